"""A small model over padded tokens, and examples for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

WORDS, WIDTH, LABELS = 30, 8, 3
Example = tuple[Tensor, int]


def some_examples(number: int = 8, seed: int = 0) -> list[Example]:
    """Tokens of 3 to 9 words, and labels of all kinds."""
    draw = np.random.default_rng(seed)
    lengths = [3 + k % 7 for k in range(number)]
    return [(torch.from_numpy(draw.integers(1, WORDS, size)), k % LABELS) for k, size in enumerate(lengths)]


class Model(nn.Module):
    """From a list of examples to losses: an embedding, something in between, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.out = nn.Linear(WIDTH, LABELS)

    def forward(self, examples: list[Example]) -> Tensor:
        tokens = pad_sequence([tokens for tokens, _ in examples], batch_first=True)
        lengths = torch.tensor([len(tokens) for tokens, _ in examples])
        labels = torch.tensor([label for _, label in examples])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        return self.losses(self.out(self.encode(tokens, mask, lengths)), labels)

    def encode(self, tokens: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return masked_mean(self.words(tokens), mask)

    def losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(scores, labels, reduction="none")


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(2).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)
