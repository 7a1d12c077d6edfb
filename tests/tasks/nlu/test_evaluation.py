"""Evaluation: every answer to its own utterance, shared among workers, in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from edpsgd.distributed.launchers import resolve
from models.heads import IntentSlotModel, Prediction
from tasks.nlu import generator
from tasks.nlu.corpus import Corpus, Utterance
from tasks.nlu.evaluation import evaluate
from tasks.nlu.example_batches import Examples
from tasks.nlu.labels import Labels
from tasks.nlu.metrics import scores
from tests.helpers.examples import ROWS, examples_of, small_model
from tests.helpers.small_models import inputs


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
