"""Batches of a corpus against a construction utterance by utterance; buckets; labels; bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from edpsgd.distributed.launchers import resolve
from models.bert import BERT
from models.clc import CLC
from models.heads import IntentSlotModel, Prediction
from tasks.nlu import generator
from tasks.nlu.corpus import Corpus, Utterance, word_places
from tasks.nlu.evaluation import evaluate
from tasks.nlu.example_batches import Examples
from tasks.nlu.labels import Labels
from tasks.nlu.metrics import scores
from tests.helpers.small_models import LISTED, inputs, tiny_configuration

ROWS = np.array([3, 50, 7, 21, 22, 23, 59, 0])


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(generator.utterances(60, seed=3))


def examples_of(corpus: Corpus, rows: np.ndarray, kind: str = "clc", **settings) -> Examples:
    return Examples(corpus, rows, inputs(kind).table(corpus.words), Labels.of_rows(corpus, rows), **settings)


def small_model(kind: str, labels: Labels) -> IntentSlotModel:
    torch.manual_seed(0)
    sizes = {"intents": len(labels.intents), "tags": len(labels.tags)}
    if kind == "clc":
        return CLC(len(LISTED) + 1, 8, **sizes, train_words=True, hidden=8, layers=1, characters=4, filters=4).eval()
    return BERT(tiny_configuration(len(inputs(kind).tokenizer)), **sizes).eval()


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


def test_labels_are_those_of_the_rows() -> None:
    said = [
        Utterance(("call", "anna"), ("O", "B-name"), "phone"),
        Utterance(("at", "nine", "pm"), ("O", "B-time", "I-time"), "clock"),
        Utterance(("play", "it"), ("O", "O"), "music"),
        Utterance(("by", "abba"), ("O", "B-artist"), "music"),
    ]
    corpus = Corpus(said)
    assert Labels.of_rows(corpus, np.array([2, 0])) == Labels(["music", "phone"], ["O", "B-name", "I-name"])
    assert Labels.of_rows(corpus, np.array([2])) == Labels(["music"], ["O"])
    tags = ["O", "B-artist", "I-artist", "B-time", "I-time"]
    assert Labels.of_rows(corpus, np.array([3, 1])) == Labels(["clock", "music"], tags)
    assert Labels.of_slots(["b", "a", "b"], ["y", "x", "y"]) == Labels(["a", "b"], ["O", "B-x", "I-x", "B-y", "I-y"])


def test_labels_that_the_model_cannot_answer(corpus) -> None:
    """They are number 0 in a batch; evaluation compares strings, and counts an error."""
    said = [Utterance(("call", "anna"), ("O", "B-name"), "phone"), Utterance(("call", "the"), ("O", "B-team"), "sport")]
    corpus, labels = Corpus(said), Labels.of_slots(["phone"], ["name"])
    examples = Examples(corpus, np.array([0, 1]), inputs("clc").table(corpus.words), labels)
    found = examples.batch([1, 0])
    assert found["intents"].tolist() == [0, 0]
    assert found["tags"].tolist() == [[0, 0], [0, 1]]
    model = small_model("clc", labels)
    result = evaluate(model, examples, labels, resolve("local"), torch.device("cpu"))
    assert result["intent_accuracy"] == 50.0  # of two, the model knows one name only


class Oracle(IntentSlotModel):
    """Answers with what the batch says: evaluation must give every answer to its own utterance."""

    def __init__(self) -> None:
        super().__init__(1, 1, 1, 0.0)

    def predict(self, batch, with_scores=False):
        assert not self.training
        rows = zip(batch["intents"].tolist(), batch["tags"].tolist(), batch["mask"].sum(1).tolist(), strict=True)
        return [Prediction(intent, 1.0, tags[:length], []) for intent, tags, length in rows]


class OneOf:
    """The workers of a team, one after the other; each sees what those before it have given."""

    def __init__(self, rank: int, size: int, given: list) -> None:
        self.rank, self.size, self._given = rank, size, given

    def gather(self, value):
        self._given.append(value)
        return list(self._given)


def test_evaluation_gives_each_answer_to_its_own_utterance(corpus) -> None:
    examples, labels = examples_of(corpus, ROWS, bucket_size=3), Labels.of_rows(corpus, ROWS)
    model = Oracle().train()
    perfect = evaluate(model, examples, labels, resolve("local"), torch.device("cpu"))
    assert (perfect["ser"], perfect["intent_accuracy"], perfect["slot_f1"]) == (0.0, 100.0, 100.0)
    assert perfect["utterances"] == 8
    assert model.training


def test_workers_share_the_utterances(corpus) -> None:
    """Three of them answer all, each once, and the last one sees the whole result."""
    examples, labels = examples_of(corpus, ROWS), Labels.of_rows(corpus, ROWS)
    model, given = small_model("clc", labels), []
    for rank in range(3):
        together = evaluate(model, examples, labels, OneOf(rank, 3, given), torch.device("cpu"))
    assert [part.utterances for part in given] == [3, 3, 2]
    assert together == pytest.approx(evaluate(model, examples, labels, resolve("local"), torch.device("cpu")))
    answers = [model.predict(examples.batch([number]))[0] for number in range(8)]
    named = [(labels.intents[a.intent], [labels.tags[tag] for tag in a.tags]) for a in answers]
    assert together == pytest.approx(scores([corpus[row] for row in ROWS], named))


def test_more_workers_than_utterances(corpus) -> None:
    """Those without one take part all the same."""
    examples, labels = examples_of(corpus, ROWS[:2]), Labels.of_rows(corpus, ROWS)
    model, given = small_model("clc", labels), []
    for rank in range(4):
        together = evaluate(model, examples, labels, OneOf(rank, 4, given), torch.device("cpu"))
    assert [part.utterances for part in given] == [1, 1, 0, 0]
    assert together == pytest.approx(evaluate(model, examples, labels, resolve("local"), torch.device("cpu")))


def test_evaluation_keeps_one_bucket_in_memory() -> None:
    """No list grows with the number of utterances."""
    corpus = Corpus(generator.utterances(2000, seed=1))
    rows = np.arange(len(corpus))
    examples, labels = examples_of(corpus, rows), Labels.of_rows(corpus, rows)
    tracemalloc.start()
    evaluate(Oracle(), examples, labels, resolve("local"), torch.device("cpu"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(corpus.word_ids) + 20 * len(corpus) + 1_000_000


def test_places(corpus) -> None:
    expected = [place for row in (5, 2, 5) for place in range(corpus.starts[row], corpus.starts[row + 1])]
    assert word_places(corpus, np.array([5, 2, 5])).tolist() == expected
    assert word_places(corpus, np.array([], dtype=np.int64)).tolist() == []


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
