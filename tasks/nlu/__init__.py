"""Intents and slots of utterances: corpora, examples, training, run folders, predictions."""
