"""A step of the training: what it draws, its losses, and its gradients against autograd's."""

from __future__ import annotations

import pytest
import torch

from models.heads import IntentSlotModel
from tasks.nlu import configuration, generator, new_model
from tasks.nlu.corpus import Corpus
from tasks.nlu.example_batches import Examples
from tasks.nlu.labels import Labels
from tasks.nlu.training_figures import LossSum
from tasks.nlu.training_state import State
from tasks.nlu.training_step import (
    StepLosses,
    dropout_seed,
    micro_batches_of_steps,
    plain_backward,
    private_backward,
)
from tests.helpers.common import needs_bf16
from tests.helpers.examples import ROWS, examples_of, small_model
from tests.helpers.jobs import metrics, run, tiny, weights
from tests.helpers.small_models import tiny_configuration

CPU = torch.device("cpu")


class Drawn:
    """A sampler whose draws are given."""

    def __init__(self, draws, micro_batches, together=False) -> None:
        self.draws, self.micro_batches, self.together = draws, micro_batches, together

    def __iter__(self):
        return iter(self.draws)


@pytest.mark.parametrize(
    ("batches", "steps"),
    [
        (Drawn([[1, 2], [3], [4, 5]], micro_batches=2), [[[1, 2], [3]], [[4]]]),
        (Drawn([[1, 5], [], [5]], micro_batches=1), [[[1]], [[]], [[]]]),
        (Drawn([[1, 2, 5], [4]], micro_batches=3, together=True), [[[1, 2]], [[4]]]),
        (Drawn([[1, 5, 2], []], micro_batches=None), [[[1], [], [2]], []]),
    ],
)
def test_the_micro_batches_of_each_step(batches, steps) -> None:
    """The last step may have fewer. Example 5 is blank: it is drawn, and nothing of it is left."""
    assert list(micro_batches_of_steps(batches, blanks={5})) == steps


def test_every_worker_and_step_has_a_dropout_of_its_own() -> None:
    seeds = {dropout_seed(seed, rank, step) for seed in (0, 1) for rank in range(3) for step in range(4)}
    assert len(seeds) == 2 * 3 * 4
    assert dropout_seed(7, 1, 2) == dropout_seed(7, 1, 2)


@pytest.fixture(scope="module")
def prepared() -> tuple[IntentSlotModel, Examples]:
    corpus = Corpus(generator.utterances(60, seed=3))
    examples = examples_of(corpus, ROWS, bucket_size=2)
    return small_model("clc", Labels.of_rows(corpus, ROWS)), examples


def losses_of(model: IntentSlotModel, total: LossSum) -> StepLosses:
    return StepLosses(model, configuration.Config(private="off"), CPU, total)


def alone(model: IntentSlotModel, examples: Examples, rows) -> torch.Tensor:
    """The loss of each utterance in a batch of its own."""
    return torch.cat([model(examples.batch([row])) for row in rows])


def test_losses_by_every_way_are_those_of_single_utterances(prepared) -> None:
    model, examples = prepared
    rows = [4, 1, 7, 0, 6]
    expected = alone(model, examples, rows).detach()
    for way in ("mean_loss", "losses_by_bucket", "losses_in_one_pass"):
        total = LossSum(CPU)
        found = getattr(losses_of(model, total), way)(examples, rows)
        if way == "mean_loss":
            torch.testing.assert_close(found.detach(), expected.mean())
        elif way == "losses_by_bucket":
            parts = [part.detach() for part in found]
            assert [len(part) for part in parts] == [2, 2, 1]
            torch.testing.assert_close(torch.cat(parts).sort().values, expected.sort().values)
        else:
            torch.testing.assert_close(found.detach(), expected)
        assert total.mean_with(State()) == pytest.approx(float(expected.mean()))


def test_no_utterances_have_no_losses(prepared) -> None:
    model, examples = prepared
    total = LossSum(CPU)
    assert losses_of(model, total).losses_in_one_pass(examples, []).shape == (0,)
    assert total.mean_with(State()) == 0.0


def gradient(model: IntentSlotModel) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("micro_batches", [[[0, 3], [5]], [[0, 3, 5], [], []], [[2]]])
def test_a_plain_gradient_is_that_of_the_mean_over_micro_batches(prepared, micro_batches) -> None:
    """An empty micro-batch is zero in the mean, and not left out of it."""
    model, examples = prepared
    model.zero_grad()
    means = [alone(model, examples, rows).mean() for rows in micro_batches if rows]
    (sum(means) / len(micro_batches)).backward()
    expected = gradient(model)
    model.zero_grad()
    plain_backward(losses_of(model, LossSum(CPU)), examples, micro_batches)
    for found, wanted in zip(gradient(model), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_nothing_drawn_has_no_plain_gradient(prepared) -> None:
    model, examples = prepared
    model.zero_grad()
    plain_backward(losses_of(model, LossSum(CPU)), examples, [[], []])
    assert gradient(model) == []


class Recorder:
    """A private optimizer that only notes what it is given."""

    def __init__(self, model: IntentSlotModel) -> None:
        self.model, self.calls = model, []

    def backward(self, losses: torch.Tensor) -> None:
        self.calls.append(len(losses))

    def accumulate(self) -> None:
        has_gradient = any(parameter.grad is not None for parameter in self.model.parameters())
        self.calls.append("gradient" if has_gradient else "nothing")
        self.model.zero_grad()


@pytest.mark.parametrize(
    ("micro_batches", "unit", "calls"),
    [
        ([[1], [], [2], [3]], "example", [2, 1, "nothing"]),
        ([[0, 1, 2]], "one pass", [3]),
        ([[]], "one pass", [0]),
        ([[0, 1], [], [2]], "micro-batch", ["gradient", "nothing"]),  # step() closes the last
        ([[0, 1], []], "micro-batch", ["gradient", "nothing"]),  # which has no gradient here
    ],
)
def test_the_private_optimizer_gets_every_unit_once(prepared, micro_batches, unit, calls) -> None:
    model, examples = prepared
    model.zero_grad()
    optimizer = Recorder(model)
    losses = losses_of(model, LossSum(CPU))
    private_backward(
        optimizer,
        losses,
        examples,
        micro_batches,
        is_example_unit=unit == "example",
        is_one_pass=unit == "one pass",
    )
    assert optimizer.calls == calls


# -------------------------------------------------------------------- in whole jobs


@pytest.mark.parametrize(("sampling", "batch_size", "micro_batches"), [("shuffled", 3, 4), ("poisson", 1, 2)])
def test_small_micro_batches_are_clipped_in_one_pass(
    tmp_path, monkeypatch, sampling, batch_size, micro_batches
) -> None:
    """With the result of the loop, which larger ones take; a Poisson draw leaves whole steps empty."""
    common = {"batch_size": batch_size, "micro_batches": micro_batches, "sampling": sampling, "dropout": 0.0}
    once = run(tiny(tmp_path / "once", seed=5, **common))
    monkeypatch.setattr(configuration, "FEW", 1)
    loop = run(tiny(tmp_path / "loop", seed=5, **common))
    for name, tensor in weights(once.folder).items():
        torch.testing.assert_close(tensor, weights(loop.folder)[name], rtol=1e-3, atol=1e-5)
    texts = ["in one backward pass" in " ".join(o.epsilon.conditions) for o in (once, loop)]
    assert texts == [True, False]
    assert float(once.epsilon) == float(loop.epsilon)


@needs_bf16
@pytest.mark.parametrize("model", ["clc", "bert"])
@pytest.mark.parametrize("private", ["off", "edp", "example"])
def test_half_precision(tmp_path, monkeypatch, model, private) -> None:
    """A little noise of rounding, and nothing more: nothing is discarded, and the loss is nearly the same."""
    monkeypatch.setattr(new_model, "paper_configuration", tiny_configuration)  # the paper's takes ten times as long
    settings = {"model": model, "private": private, "seed": 2, "epochs": 1, "noise_multiplier": 1e-3}
    for precision in ("fp32", "bf16"):
        run(tiny(tmp_path / precision, precision=precision, **settings))
    exact, rounded = (metrics(tmp_path / precision)[0] for precision in ("fp32", "bf16"))
    assert rounded["loss"] != exact["loss"]
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=1e-3)
    assert rounded.get("discarded", 0) == 0
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16").values()} == {torch.float32}
