"""Batches of a corpus against a construction utterance by utterance; buckets; bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tasks.nlu import generator
from tasks.nlu.corpus import Corpus
from tasks.nlu.labels import Labels
from tests.helpers.examples import ROWS, examples_of, small_model
from tests.helpers.small_models import inputs


@pytest.mark.parametrize("kind", ["clc", "bert"])
def test_batch_is_what_a_naive_construction_gives(corpus, kind) -> None:
    """Numbers count within the examples' rows, in any order, and twice if they are given twice."""
    examples, labels = examples_of(corpus, ROWS, kind), Labels.of_rows(corpus, ROWS)
    chosen = [5, 0, 2, 5]
    said = [corpus[ROWS[number]] for number in chosen]
    longest = max(len(one.words) for one in said)
    found = examples.batch(chosen)
    assert found["intents"].tolist() == [labels.intents.index(one.intent) for one in said]
    padding = [[0] * (longest - len(one.words)) for one in said]
    expected = [[labels.tags.index(tag) for tag in one.tags] for one in said]
    assert found["tags"].tolist() == [tags + rest for tags, rest in zip(expected, padding, strict=True)]
    assert found["mask"].sum(1).tolist() == [len(one.words) for one in said]
    words = sorted({word for one in said for word in one.words})
    numbers = np.array([words.index(word) for one in said for word in one.words])
    for name, tensor in inputs(kind).table(words).batch(numbers, np.array([len(one.words) for one in said])).items():
        if name in ("mask", "lengths", "pieces", "read", "first"):  # those that do not depend on the words' numbers
            assert torch.equal(found[name], tensor), name
    if kind == "clc":
        known = inputs(kind).vectors.lookup([word for one in said for word in one.words]) + 1
        assert found["rows"][found["place"]][found["mask"]].tolist() == known.tolist()
        alone = [inputs(kind).table([w]).batch(np.array([0]), np.array([1]))["characters"][0] for w in said[0].words]
        for place, characters in zip(found["place"][0], alone, strict=False):
            spelled = found["characters"][place]
            assert spelled[spelled > 0].tolist() == characters.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_buckets_hold_every_example_once_and_by_length(corpus, size) -> None:
    examples = examples_of(corpus, ROWS, bucket_size=size)
    chosen = [6, 1, 7, 3, 0]
    parts = examples.sorted_parts(chosen)
    order = np.concatenate(parts).tolist()
    assert sorted(order) == sorted(chosen)
    lengths = [len(corpus[ROWS[number]].words) for number in order]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(part) for part in parts] == [min(size, 5 - begin) for begin in range(0, 5, size)]
    for part, bucket in zip(parts, examples.buckets(chosen), strict=True):
        expected = examples.batch(part)
        assert bucket.keys() == expected.keys()
        assert all(torch.equal(bucket[name], expected[name]) for name in bucket)
    assert list(examples.buckets([])) == []
    assert len(examples) == 8


@pytest.mark.parametrize("kind", ["clc", "bert"])
def test_gradient_does_not_depend_on_buckets(corpus, kind) -> None:
    """That of a micro-batch is the same in buckets of two and at once."""
    labels = Labels.of_rows(corpus, ROWS)
    gradients = []
    for size in (2, 100):
        examples = examples_of(corpus, ROWS, kind, bucket_size=size)
        model = small_model(kind, labels).double()
        (torch.stack([model(bucket).sum() for bucket in examples.buckets(range(8))]).sum() / 8).backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_memory() -> None:
    """Eight bytes for each word with its tag, twenty for an utterance; the rest grows with distinct words only."""
    corpus = Corpus(generator.utterances(5000, seed=1))
    rows = np.arange(len(corpus))
    examples = examples_of(corpus, rows)
    arrays = {id(a): a for holder in (corpus, examples, examples._table) for a in vars(holder).values()}.values()
    total = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    needed = 8 * len(corpus.word_ids) + 20 * len(corpus)
    distinct = 40 * len(corpus.words) + 1000
    assert needed <= total <= needed + distinct
    assert distinct < needed / 5
    lists = [item for holder in (corpus, examples) for item in vars(holder).values() if isinstance(item, list | dict)]
    assert sum(map(len, lists)) <= len(corpus.words) + len(corpus.tags) + len(corpus.intents)
