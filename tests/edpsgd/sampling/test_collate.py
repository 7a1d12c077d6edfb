"""Empty batches: the structure of full ones, and nothing of any example."""

from __future__ import annotations

import collections
import pickle

import pytest
import torch

import edpsgd

Pair = collections.namedtuple("Pair", "words intent")


@pytest.mark.parametrize(
    ("example", "emptied"),
    [
        (torch.zeros(3, 2), torch.zeros(0, 3, 2)),
        (5, torch.zeros(0, dtype=torch.int64)),
        ((torch.zeros(3), 1.5), (torch.zeros(0, 3), torch.zeros(0, dtype=torch.float64))),
        (Pair(torch.zeros(3), 1), Pair(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))),
        ({"a": {"b": torch.zeros(2)}, "text": "x"}, {"a": {"b": torch.zeros(0, 2)}, "text": []}),
        (("call anna", 3), ((), torch.zeros(0, dtype=torch.int64))),
        (("call anna", "intent"), ((), ())),
    ],
)
def test_empty_batches_have_the_structure_of_full_ones(example, emptied) -> None:
    def compare(found, expected) -> None:
        assert type(found) is type(expected) or isinstance(found, list)
        if isinstance(expected, torch.Tensor):
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
        elif isinstance(expected, dict):
            assert found.keys() == expected.keys()
            for name in expected:
                compare(found[name], expected[name])
        else:
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                compare(a, b)

    compare(edpsgd.Collate(example)([]), emptied)
    pickle.loads(pickle.dumps(edpsgd.Collate(example)))


def test_collate_uses_the_given_function_and_keeps_batch_types() -> None:
    from transformers import BatchEncoding

    collate = edpsgd.Collate(
        {"ids": [1, 2]}, lambda examples: BatchEncoding({"ids": torch.tensor([e["ids"] for e in examples])})
    )
    assert isinstance(collate([]), BatchEncoding)
    assert collate([])["ids"].shape == (0, 2)
    assert collate([{"ids": [3, 4]}])["ids"].tolist() == [[3, 4]]


def test_nothing_of_the_example_stays_in_an_empty_batch() -> None:
    def joined(examples):
        batch = collections.defaultdict(list)
        batch.update(text=" ".join(examples), count=len(examples))
        return batch

    empty = edpsgd.Collate("private words", joined)([])
    assert (empty["text"], empty["count"], type(empty)) == ("", 0, collections.defaultdict)
    with pytest.raises(ValueError, match="Collate cannot empty a set"):
        edpsgd.Collate("x", set)([])
