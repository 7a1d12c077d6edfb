"""Reference models: CLC (character CNN, BiLSTM, CRF) and BERT, both with intent and slot heads."""
