"""What several files of tests compute with, and nothing changes."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, BertModel

from tasks.nlu import generator
from tasks.nlu.corpus import Corpus
from tests.helpers.small_models import ENCODER, tiny_configuration


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return Corpus(generator.utterances(60, seed=3))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> str:
    """A tiny BERT with the wordpieces of MiniLM."""
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = AutoTokenizer.from_pretrained(ENCODER)
    tokenizer.save_pretrained(folder)
    BertModel(tiny_configuration(len(tokenizer), layers=1)).save_pretrained(folder)
    return str(folder)
