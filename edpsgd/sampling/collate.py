"""Batches that may be empty: what a sampler hands out as a list of no examples must still be a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.data import default_collate


class Collate:
    """A collate function for batches that may be empty: tensors then have a first dimension of 0, lists no entries.

    Args:
        example: any example of the data set; only its structure is used.
        collate_fn: what makes a batch of examples, torch's default_collate unless given.

    Example:
        >>> collate = Collate({"words": torch.zeros(5), "intent": 3})
        >>> {name: tuple(value.shape) for name, value in collate([]).items()}
        {'words': (0, 5), 'intent': (0,)}
    """

    def __init__(self, example: Any, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        self._example = example
        self._collate_fn = collate_fn

    def __call__(self, examples: list[Any]) -> Any:
        """The batch of these examples, which may be none."""
        if len(examples):
            return self._collate_fn(examples)
        return _emptied(self._collate_fn([self._example]))


def _emptied(batch: Any) -> Any:
    """The batch without its one example, in the same structure."""
    if isinstance(batch, torch.Tensor):
        return batch[:0] if batch.dim() else batch.new_empty(0)
    if isinstance(batch, MutableMapping):
        emptied = copy.copy(batch)
        emptied.update({name: _emptied(value) for name, value in batch.items()})
        return emptied
    if isinstance(batch, tuple | list):
        is_named_tuple = hasattr(batch, "_fields")
        has_parts = any(isinstance(part, torch.Tensor | Mapping | tuple | list) for part in batch)
        # A plain list without such parts holds one entry for each example, such as its text.
        parts = [_emptied(part) for part in batch] if has_parts or is_named_tuple else []
        return type(batch)(*parts) if is_named_tuple else type(batch)(parts)
    if isinstance(batch, str | int | float):
        return type(batch)()  # a text or a count of the batch: nothing of the example may stay
    raise ValueError(f"Collate cannot empty a {type(batch).__name__}: use a collate_fn that takes an empty list itself")
