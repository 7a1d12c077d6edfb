"""Examples of generated utterances, and the smallest models for them."""

from __future__ import annotations

import numpy as np
import torch

from models.bert import BERT
from models.clc import CLC
from models.heads import IntentSlotModel
from tasks.nlu.corpus import Corpus
from tasks.nlu.example_batches import Examples
from tasks.nlu.labels import Labels
from tests.helpers.small_models import LISTED, inputs, tiny_configuration

ROWS = np.array([3, 50, 7, 21, 22, 23, 59, 0])


def examples_of(corpus: Corpus, rows: np.ndarray, kind: str = "clc", **settings) -> Examples:
    return Examples(corpus, rows, inputs(kind).table(corpus.words), Labels.of_rows(corpus, rows), **settings)


def small_model(kind: str, labels: Labels) -> IntentSlotModel:
    torch.manual_seed(0)
    sizes = {"intents": len(labels.intents), "tags": len(labels.tags)}
    if kind == "clc":
        return CLC(len(LISTED) + 1, 8, **sizes, train_words=True, hidden=8, layers=1, characters=4, filters=4).eval()
    return BERT(tiny_configuration(len(inputs(kind).tokenizer)), **sizes).eval()
