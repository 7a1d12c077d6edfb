"""Reference models: CLC (character CNN, BiLSTM, CRF), its frozen form and BERT, all with intent and slot heads."""
