"""What workers must have alike, when they make their optimizers and in every step."""

from __future__ import annotations

import pytest

from edpsgd import Budget
from edpsgd.agreement import describe_step
from edpsgd.ledger.budget import BudgetExhausted
from tests.helpers.common import Bag, private
from tests.helpers.threads import run_workers


def test_a_ledger_file_on_one_worker_only_is_refused_on_all(tmp_path) -> None:
    def work(worker) -> None:
        private(Bag((5,)), collective=worker, ledger=tmp_path / "ledger.jsonl" if worker.rank else None)

    errors = run_workers(2, work)
    assert all("the workers disagree on whether there is a ledger file" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"clip_norm": 2.0}, "clip_norm"),
        ({"noise_multiplier": 2.0}, "noise_multiplier"),
        ({"seed": 1}, "seeded"),
        ({"budget": Budget(1.0, 1e-5)}, "budget"),
        ({"layer_scaling": {"p0": 1.0, "p1": 2.0}}, "layer_scaling"),
        ({"verify": "always"}, "verify"),
    ],
)
def test_optimizers_that_differ_are_refused_on_all(change, named) -> None:
    def work(worker) -> None:
        private(Bag((5, 5)), collective=worker, **(change if worker.rank == 1 else {}))

    assert all(f"the workers disagree on {named}: worker 0" in str(error) for error in run_workers(2, work))


def test_models_that_differ_are_refused_on_all() -> None:
    errors = run_workers(2, lambda worker: private(Bag((5, 5 + worker.rank)), collective=worker))
    assert all("the workers disagree on parameter 1" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda optimizer: optimizer.set_epoch(1), "the epoch"),
        (lambda optimizer: optimizer.accumulate() or optimizer.accumulate(), "the number of micro-batches in a step"),
        (lambda optimizer: setattr(optimizer, "clip_norm", 0.5), "the clip norm"),
    ],
)
def test_steps_that_differ_are_refused_on_all(act, named) -> None:
    def work(worker) -> None:
        optimizer = private(Bag((5,)), collective=worker)
        optimizer.set_epoch(0)
        if worker.rank == 1:
            act(optimizer)
        optimizer.step()

    assert all(f"the workers disagree on {named}: worker 0" in str(error) for error in run_workers(2, work))


def test_a_step_is_described_by_reasons_before_what_follows_from_them() -> None:
    """The first difference is the one that is named."""
    optimizer = private(Bag((5,)))
    described = describe_step(
        optimizer._bookkeeping,
        optimizer._accumulator,
        refusal=BudgetExhausted("spent: 3.14"),
        number=7,
        epoch=2,
        noise_multiplier=0.5,
    )
    assert list(described)[:2] == ["whether the workers are those of the start", "whether the step may be taken"]
    assert described["whether the step may be taken"] == "no, the budget"  # without what this worker has spent
    assert (described["the step counter"], described["the epoch"], described["the noise multiplier"]) == (7, 2, 0.5)
    assert described["the number of micro-batches in a step"] == 0
