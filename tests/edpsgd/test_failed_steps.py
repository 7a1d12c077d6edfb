"""Steps that fail: nothing is left of them, and nothing that they released comes again unpaid."""

from __future__ import annotations

import contextlib
import copy
import errno
import os

import pytest
import torch

import edpsgd
from tests.helpers.common import FRESH, Bag, Spy, assert_uncorrelated, private, set_gradients


def test_an_inner_step_that_fails_leaves_no_gradient() -> None:
    model = Bag()
    optimizer = private(model)

    def fail(*_) -> None:
        raise RuntimeError("out of memory")

    handle = optimizer._inner.register_step_pre_hook(fail)
    set_gradients(model, 1.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    handle.remove()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.ledger.events[0].steps == 1


class Breaks(Spy):
    """Sends some message, and then fails."""

    def __init__(self, message: int = 1) -> None:
        super().__init__()
        self.message = message

    def sum_(self, tensors) -> None:
        super().sum_(tensors)
        if self.messages == self.message:
            raise RuntimeError("a worker is gone")


def test_the_noise_of_a_failed_step_is_not_used_again() -> None:
    model, spy = Bag(), Breaks()
    optimizer = private(model, collective=spy)
    with pytest.raises(RuntimeError, match="gone"):
        optimizer.step()
    optimizer.step()
    assert_uncorrelated(spy.sent[0][:10500], spy.sent[1][:10500], FRESH)


def test_a_step_that_left_and_was_not_taken_costs_a_pass_of_its_own() -> None:
    """Other workers may have the sum. The same examples come again, in the same epoch."""
    model, spy = Bag(), Breaks()
    batches = edpsgd.ShuffledBatches(4, batch_size=2, collective="local")
    optimizer = private(model, collective=spy, batches=batches)
    optimizer.set_epoch(0)
    drawn = iter(batches)
    next(drawn)
    with pytest.raises(RuntimeError, match="gone"):
        optimizer.step()
    optimizer.step()
    next(drawn)
    optimizer.step()
    assert [(event.epoch, event.steps) for event in optimizer.ledger.events] == [(0, 1), (0, 2)]
    assert float(optimizer.epsilon(1e-5)) == edpsgd.accounting.gaussian_epsilon([1.0, 1.0], 1e-5)


def test_so_it_does_after_a_checkpoint() -> None:
    """Of the second step of the epoch, which was lost and is taken by another process."""
    model, batches = Bag(), edpsgd.ShuffledBatches(4, batch_size=2, collective="local")
    optimizer = private(model, collective=Breaks(2), batches=batches)
    optimizer.set_epoch(0)
    drawn = iter(batches)
    next(drawn)
    optimizer.step()
    next(drawn)
    with pytest.raises(RuntimeError, match="gone"):
        optimizer.step()
    batches = edpsgd.ShuffledBatches(4, batch_size=2, collective="local")
    resumed = private(Bag(), collective="local", batches=batches)
    resumed.load_state_dict(optimizer.state_dict())
    for one in (resumed, copy.deepcopy(resumed)):
        next(iter(one.batches))
        one.step()
        assert [(event.epoch, event.steps) for event in one.ledger.events] == [(0, 2), (0, 1)]


def test_a_budget_knows_of_a_step_that_was_lost() -> None:
    """There is one pass in it, and the step that comes again would be of another one."""
    enough = edpsgd.accounting.gaussian_epsilon([1.0], 1e-5) * 1.01
    batches = edpsgd.ShuffledBatches(4, batch_size=2, collective="local")
    optimizer = private(Bag(), collective=Breaks(), batches=batches, budget=edpsgd.Budget(enough, 1e-5))
    optimizer.set_epoch(0)
    next(iter(batches))
    with pytest.raises(RuntimeError, match="gone"):
        optimizer.step()
    with pytest.raises(edpsgd.BudgetExhausted):
        optimizer.step()
    assert float(optimizer.epsilon(1e-5)) <= enough


def test_a_draw_that_left_is_not_used_again() -> None:
    """Two releases of one draw are not what two draws cost."""
    batches = edpsgd.PoissonBatches(8, sampling_rate=0.5, collective="local")
    optimizer = private(Bag(), collective=Breaks(), batches=batches)
    optimizer.set_epoch(0)
    next(iter(batches))
    with pytest.raises(RuntimeError, match="gone"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="its draw must not be used again"):
        optimizer.step()
    optimizer.set_epoch(0)
    next(iter(batches))
    optimizer.step()
    assert [event.steps for event in optimizer.ledger.events if event.steps] == [1, 1]


def test_nor_after_a_checkpoint() -> None:
    """From the middle of an epoch, which set_epoch would go on with if no step had been lost."""

    def build(collective) -> edpsgd.PrivateOptimizer:
        batches = edpsgd.PoissonBatches(64, sampling_rate=0.25, collective="local")
        return private(Bag(), collective=collective, batches=batches)

    first, resumed = build("local"), build(Breaks())
    first.set_epoch(0)
    next(iter(first.batches))
    first.step()
    resumed.load_state_dict(first.state_dict())
    drawn = next(iter(resumed.batches))
    with pytest.raises(RuntimeError, match="gone"):
        resumed.step()
    resumed.set_epoch(0)
    assert resumed.batches.position == 0
    assert next(iter(resumed.batches)) != drawn


def test_nor_with_a_seed_after_a_checkpoint_that_was_written_then() -> None:
    def build(collective) -> edpsgd.PrivateOptimizer:
        batches = edpsgd.PoissonBatches(64, sampling_rate=0.25, collective="local", seed=1)
        return private(Bag(), collective=collective, batches=batches)

    first, resumed = build(Breaks(2)), build("local")
    first.set_epoch(0)
    draws = iter(first.batches)
    next(draws)
    first.step()
    drawn = next(draws)
    with pytest.raises(RuntimeError, match="gone"):
        first.step()
    resumed.load_state_dict(first.state_dict())
    resumed.set_epoch(0)
    assert drawn not in list(resumed.batches)


def test_a_clip_norm_that_could_not_be_noted_is_not_set(tmp_path, monkeypatch) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="cannot be written"):
            optimizer.clip_norm = 0.1
    assert optimizer.clip_norm == 1.0
    optimizer.clip_norm = 0.1
    assert edpsgd.Ledger.read(tmp_path / "ledger.jsonl").runs[-1].clip_norm == 0.1


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    """Moments of another run would be releases that are not in this ledger."""

    def trained(value: float) -> edpsgd.PrivateOptimizer:
        model = Bag((5,))
        batches = edpsgd.ShuffledBatches(4, batch_size=2, collective="local")
        optimizer = private(model, torch.optim.Adam(model.parameters()), batches=batches)
        optimizer.set_epoch(0)
        next(iter(batches))
        set_gradients(model, value)
        optimizer.step()
        return optimizer

    one, two = trained(1.0), trained(-1.0)
    before = copy.deepcopy(two.state_dict())
    with pytest.raises(edpsgd.LedgerError, match="different runs"):
        two.load_state_dict(one.state_dict())
    other = two.state_dict()
    other["edpsgd"]["batches"]["layout"]["batch_size"] = 1
    with pytest.raises(ValueError, match="other examples, workers or batch sizes"):
        two.load_state_dict(other)
    after = two.state_dict()
    other = two.state_dict()
    other["param_groups"] = other["param_groups"] * 2
    with pytest.raises(ValueError, match="other parameter groups"):
        two.load_state_dict(other)
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    assert after["edpsgd"] == before["edpsgd"]
    next(iter(two.batches))
    two.step()
    assert [event.steps for event in two.ledger.events] == [2]  # of the same pass


def test_a_step_that_failed_leaves_no_loss_scale() -> None:
    """A GradScaler would multiply the next one by it."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = private(model, clip_norm=1e3, noise_multiplier=0.0, collective=Breaks())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        with contextlib.suppress(RuntimeError):
            scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 4), -2.0))
    optimizer.accumulate()
    optimizer.step()  # without a scaler


class WithAnother(Spy):
    """Worker 0 of two; the other one has clipped in one pass."""

    size = 2

    def sum_(self, tensors) -> None:
        super().sum_(tensors)
        own, other = tensors[0][-18:-9], tensors[0][-9:]
        other.copy_(own)
        other[4] = 1.0

    def gather(self, value) -> list:
        return [value, value]


def test_what_another_worker_does_is_on_disk_before_the_model_moves(tmp_path, monkeypatch) -> None:
    """It is a condition of ε, and worker 0, who has had no data yet, learns of it with the sum."""
    path, model, write = tmp_path / "ledger.jsonl", Bag((5,)), os.write
    optimizer = private(model, collective=WithAnother(), ledger=path)
    optimizer.set_epoch(0)

    def full(descriptor: int, line: bytes) -> int:
        if b"one_pass" in line:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, line)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="cannot be written"):
            optimizer.step()
    assert not model.p0.any()
    assert not any(run.one_pass for run in edpsgd.Ledger.read(path).runs)
    optimizer.step()
    assert model.p0.any()
    assert edpsgd.Ledger.read(path).runs[-1].one_pass
    assert sum(event.steps for event in optimizer.ledger.events) == 2
