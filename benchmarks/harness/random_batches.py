"""Batches of random utterances: what a step costs does not hang on what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness.contenders import SIZES, Batch

LETTERS = 8  # of a word


def make_batches(kind: str, tokens: int, size: int, seed: int) -> tuple[Batch, list[Batch]]:
    """Random utterances, all of one length: together, and one by one."""
    rng, sizes = np.random.default_rng(seed), SIZES[kind]
    words = np.minimum(rng.zipf(1.3, (size, tokens)), sizes.words - 1)
    spelled = rng.integers(2, 60, (sizes.words, LETTERS))
    labels = rng.integers(0, sizes.tags, (size, tokens)), rng.integers(0, sizes.intents, size)

    def batch(rows: slice) -> Batch:
        parts = _pieces(words[rows]) if kind == "bert" else _distinct(words[rows], spelled)
        parts |= {"mask": np.ones_like(words[rows], dtype=bool), "tags": labels[0][rows], "intents": labels[1][rows]}
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in parts.items()}

    return batch(slice(None)), [batch(slice(row, row + 1)) for row in range(size)]


def _pieces(words: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Every word is one piece, between the two that frame an utterance."""
    framed = np.pad(words, ((0, 0), (1, 1)), constant_values=1)
    return {"pieces": framed, "read": np.ones_like(framed), "first": np.arange(1, words.shape[1] + 1) + 0 * words}


def _distinct(words: npt.NDArray[Any], spelled: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    rows, place = np.unique(words, return_inverse=True)
    lengths = np.full(len(words), words.shape[1])
    return {"rows": rows, "characters": spelled[rows], "place": place.reshape(words.shape), "lengths": lengths}
