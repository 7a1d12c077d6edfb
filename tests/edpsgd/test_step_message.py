"""The message of a step: taken by all workers or by none, and what it tells."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from edpsgd.per_example import WrongGradients
from tests.helpers.common import Bag, layers_of, private, set_gradients
from tests.helpers.threads import run_workers


def losses_of(model: nn.Module, examples: int = 4) -> torch.Tensor:
    return model(torch.arange(2.0 * examples).reshape(examples, 2)).square().sum(1)


def test_a_mean_over_a_batch_on_one_worker_stops_all() -> None:
    def work(worker) -> None:
        model = nn.Linear(2, 1)
        optimizer = private(model, unit="example", divisor=8, collective=worker)
        if worker.rank == 1:
            losses_of(model).mean().backward()
        optimizer.step()

    assert all("disagree on whether the step may be taken" in str(error) for error in run_workers(2, work))


@pytest.mark.parametrize("workers", [1, 3])
def test_losses_of_tokens_are_not_losses_of_examples(workers) -> None:
    def work(worker) -> object:
        model = nn.Linear(2, 1)
        optimizer = private(model, unit="example", divisor=4 * workers, collective=worker)
        optimizer.backward(losses_of(model, 4))
        optimizer.step()
        before = layers_of(model)
        optimizer.backward(losses_of(model, 4 * 25))
        try:
            optimizer.step()
        except ValueError as error:
            assert all(torch.equal(before[name], p.detach()) for name, p in model.named_parameters())
            return str(error)
        return None

    said = f"the step had {100 * workers} examples over all workers, and divisor says that {4 * workers} are expected"
    assert all(said in str(answer) for answer in run_workers(workers, work))


def test_the_warning_of_discards_points_at_the_step() -> None:
    model = Bag((4, 4))
    optimizer = private(model)
    set_gradients(model, math.nan)
    optimizer.accumulate()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]


def test_discards_are_counted_over_all_workers_and_told_once() -> None:
    def work(worker) -> tuple[int, int]:
        model = Bag((5,))
        optimizer = private(model, collective=worker)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                set_gradients(model, math.nan if worker.rank else 1.0)
                optimizer.step()
        return optimizer.discarded, len(caught)

    answers = run_workers(3, work)
    assert [discarded for discarded, _ in answers] == [4, 4, 4]
    assert sum(warned for _, warned in answers) <= 3


def test_a_refusal_of_one_worker_leaves_the_model_of_all_as_it_is() -> None:
    def work(worker) -> tuple[str, bool]:
        model = Bag((5,))
        optimizer = private(model, collective=worker)
        if worker.rank == 1:
            optimizer._wrong = WrongGradients("they are wrong")  # as backward() leaves it
        set_gradients(model, 1.0)
        with pytest.raises(ValueError, match="disagree on whether the step may be taken") as caught:
            optimizer.step()
        return str(caught.value), bool(model.p0.any())

    answers = run_workers(2, work)
    assert answers[0] == answers[1]
    assert "worker 0: 'yes'; worker 1: 'no, they are wrong'" in answers[0][0]
    assert not answers[0][1]
