"""The ledger, in memory and on disk."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

import edpsgd
from edpsgd import Ledger, LedgerError
from edpsgd.ledger import BLOCK, Event
from tests.helpers.common import Bag, Spy, private
from tests.helpers.ledgers import charge
from tests.helpers.paths import ROOT


def steps_in(path) -> list[int]:
    """What somebody who finds the file after a crash would count."""
    found: dict[int, int] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "event" in record:
            found[record["index"]] = record["event"]["steps"]
    return [found[index] for index in sorted(found)]


def test_every_set_epoch_opens_an_event() -> None:
    ledger = Ledger()
    for epoch in (0, 1, 1):
        charge(ledger, epoch, 3, z=0.5 + epoch)
    assert ledger.events == [Event("gradients", e, z, 3) for e, z in ((0, 0.5), (1, 1.5), (1, 1.5))]


def test_the_smallest_multiplier_of_an_event_counts() -> None:
    ledger = Ledger()
    ledger.open_epoch(0)
    for z in (0.5, 0.2, 0.9):
        ledger.charge(z)
    assert ledger.events == [Event("gradients", 0, 0.2, 3)]


def test_without_set_epoch_the_epoch_is_unknown() -> None:
    optimizer = private(Bag())
    for _ in range(3):
        optimizer.step()
    assert optimizer.ledger.events == [Event("gradients", None, 1.0, 3)]


def test_nothing_can_be_charged_before_an_event_is_open() -> None:
    with pytest.raises(LedgerError, match="open_epoch"):
        Ledger().charge(1.0)


class ReadsTheLedger(torch.optim.SGD):
    """An optimizer that looks at the file when it is about to use the noised gradient."""

    def __init__(self, model, path) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.path = path
        self.seen: list[int] = []

    def step(self, closure=None):
        self.seen.append(sum(steps_in(self.path)))
        return super().step(closure)


def test_the_entry_is_written_before_the_step(tmp_path) -> None:
    path, model = tmp_path / "ledger.jsonl", Bag()
    inner = ReadsTheLedger(model, path)
    optimizer = private(model, inner, ledger=path)
    for epoch in range(2):
        optimizer.set_epoch(epoch)
        for _ in range(BLOCK + 3):
            optimizer.step()
    assert all(on_disk >= taken for taken, on_disk in enumerate(inner.seen, 1))
    optimizer.ledger.close()
    assert steps_in(path) == [BLOCK + 3, BLOCK + 3]


def test_the_write_is_flushed_to_disk(tmp_path, monkeypatch) -> None:
    order: list[str] = []
    model = Bag()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.register_step_pre_hook(lambda *_: order.append("step"))
    optimizer = private(model, inner, ledger=tmp_path / "ledger.jsonl")
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), real(fd))[1])
    optimizer.set_epoch(0)
    for _ in range(BLOCK + 1):
        optimizer.step()
    assert order == ["fsync", *["step"] * BLOCK, "fsync", "step"]


def test_after_a_crash_the_reserved_steps_count(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.begin_run({})
    charge(ledger, 0, 5)
    assert Ledger.read(path).events == [Event("gradients", 0, 1.0, BLOCK)]


def test_a_file_is_continued(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(3):
        optimizer = private(Bag(), ledger=path)
        optimizer.set_epoch(0)
        optimizer.step()
        optimizer.ledger.close()
    ledger = Ledger.read(path)
    assert [e.steps for e in ledger.events] == [1, 1, 1]
    assert len({run.id for run in ledger.runs}) == 3
    assert ledger.runs[0].clip_norm == 1.0
    assert ledger.runs[0].workers == 1


def test_copies_leave_the_file_to_the_original(tmp_path) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    optimizer.step()
    with pytest.warns(UserWarning, match="in memory only"):
        twin = pickle.loads(pickle.dumps(optimizer))
    size = (tmp_path / "ledger.jsonl").stat().st_size
    twin.step()
    assert (tmp_path / "ledger.jsonl").stat().st_size == size
    assert sum(e.steps for e in twin.ledger.events) == 2


class ReadsBeforeTheSum(Spy):
    """A collective that looks at the file when a worker's part is about to leave it."""

    def __init__(self, path, synced: list[int]) -> None:
        super().__init__()
        self.path, self.synced = path, synced
        self.seen: list[tuple[list[int], int]] = []

    def sum_(self, tensors) -> None:
        self.seen.append((steps_in(self.path), len(self.synced)))
        super().sum_(tensors)


def test_every_release_is_on_disk_before_the_sum(tmp_path, monkeypatch) -> None:
    """Layer norms and gradients: no worker has a sum that is not paid for."""
    path, synced, real = tmp_path / "ledger.jsonl", [], os.fsync
    spy = ReadsBeforeTheSum(path, synced)
    optimizer = private(Bag(), ledger=path, collective=spy, layer_scaling=edpsgd.FirstStepNorms(1.0))
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd))[1])
    optimizer.set_epoch(0)
    optimizer.step()
    optimizer.step()
    assert spy.seen == [([0, 1], 1), ([BLOCK, 1], 2)]


def test_a_charge_that_failed_is_written_again(tmp_path, monkeypatch) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open_epoch(0)
    ledger.charge(1.0)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="cannot be written"):
            ledger.charge(0.1)
        with pytest.raises(OSError, match="cannot be written"):
            ledger.open_epoch(1)
    assert not ledger.is_open  # nothing more goes to the event before
    ledger.open_epoch(1)
    ledger.charge(0.1)
    assert Ledger.read(tmp_path / "ledger.jsonl").events[1] == Event("gradients", 1, 0.1, BLOCK)


def test_a_lower_multiplier_that_could_not_be_written_is_written_next(tmp_path, monkeypatch) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open_epoch(0)
    ledger.charge(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        with pytest.raises(OSError, match="cannot be written"):
            ledger.charge(0.1)
    ledger.charge(0.1)
    assert Ledger.read(tmp_path / "ledger.jsonl").events[0].noise_multiplier == 0.1


def test_a_failed_epoch_does_not_go_on_with_the_one_before(tmp_path, monkeypatch) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl", noise_decay=edpsgd.LinearDecay(1.0))
    optimizer.set_epoch(0)
    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="cannot be written"):
            optimizer.set_epoch(1)
    optimizer.step()
    assert optimizer.ledger.events == [Event("gradients", 0, 1.0, 1), Event("gradients", 0, 1.0, 1)]


def test_a_closed_file_takes_no_more_charges(tmp_path) -> None:
    model = Bag()
    optimizer = private(model, ledger=tmp_path / "ledger.jsonl")
    optimizer.step()
    optimizer.ledger.close()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(LedgerError, match="was closed"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_leaving_python_writes_the_exact_count(tmp_path) -> None:
    code = (
        "import sys; from tests.helpers.common import Bag, private\n"
        "optimizer = private(Bag(), ledger=sys.argv[1]); optimizer.set_epoch(0)\n"
        "for _ in range(3): optimizer.step()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "ledger.jsonl")], check=True, cwd=ROOT)
    assert [e.steps for e in Ledger.read(tmp_path / "ledger.jsonl").events] == [3]


def test_a_refused_construction_leaves_no_run(tmp_path) -> None:
    with pytest.raises(ValueError, match="clip_norm"):
        private(Bag(), clip_norm=-1.0, ledger=tmp_path / "ledger.jsonl")
    assert not (tmp_path / "ledger.jsonl").exists()


def test_what_the_ledger_marks() -> None:
    optimizer = private(Bag(), seed=3, layer_scaling=edpsgd.FirstStepNorms())
    optimizer.step()
    assert optimizer.ledger.runs[0].seeded
    assert optimizer.ledger.events == [Event("layer_norms", None, 0.0, 1)]
    assert json.loads(json.dumps(optimizer.ledger.state_dict())) == optimizer.ledger.state_dict()
    example = private(Bag(), unit="example", divisor=4)
    example.set_epoch(0)
    assert example.ledger.runs[0].unit == "example"
    assert example.ledger.events[0].batching == "unvouched"
    assert example.ledger.runs[0].sensitivity == 1.0
    assert optimizer.ledger.runs[0].sensitivity == 2.0


def test_a_ledger_that_nobody_holds_any_more_has_the_exact_count(tmp_path) -> None:
    def train() -> None:
        optimizer = private(Bag((5,)), ledger=tmp_path / "ledger.jsonl")
        optimizer.set_epoch(0)
        for _ in range(3):
            optimizer.step()

    train()
    gc.collect()
    assert [e.steps for e in Ledger.read(tmp_path / "ledger.jsonl").events] == [3]


def test_a_condition_that_could_not_be_written_is_written_next(tmp_path, monkeypatch) -> None:
    path, synced, real = tmp_path / "ledger.jsonl", [], os.fsync
    ledger = Ledger(path)
    ledger.begin_run({"unit": "example"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="cannot be written"):
            ledger.note_change({"one_pass": True})
    assert not ledger.runs[-1].one_pass
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd))[1])
    ledger.note_change({"one_pass": True})
    assert Ledger.read(path).runs[-1].one_pass
    assert synced  # before the next release


def test_a_run_on_other_units_is_refused_before_it_is_written(tmp_path) -> None:
    """Else even what was there before could not be accounted for any more."""
    path = tmp_path / "ledger.jsonl"
    users = Ledger(path)
    users.begin_run({"unit": "user"})
    users.open_epoch(0, "poisson", 0.1)
    users.charge(1.0)
    users.close()
    before, written = Ledger.read(path).epsilon(1e-5), path.read_bytes()
    with pytest.raises(LedgerError, match="steps on users and steps on examples"):
        private(Bag(), ledger=path, unit="example", divisor=4.0)
    assert path.read_bytes() == written
    assert Ledger.read(path).epsilon(1e-5) == before


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_a_multiplier_that_hides_behind_another_is_refused(value) -> None:
    ledger = Ledger()
    ledger.open_epoch(0)
    ledger.charge(1.0)
    with pytest.raises(LedgerError, match="noise multiplier must be"):
        ledger.charge(value)
    assert ledger.events == [Event("gradients", 0, 1.0, 1)]


def test_epsilon_of_a_file_is_that_of_the_run(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    model = Bag((5,))
    batches = edpsgd.PoissonBatches(20, 0.2)
    optimizer = private(model, ledger=path, batches=batches, noise_decay=edpsgd.LinearDecay(0.3))
    for epoch in range(3):
        optimizer.set_epoch(epoch)
        for _ in batches:
            optimizer.step()
    optimizer.ledger.close()
    found = edpsgd.Ledger.read(path)
    assert float(found.epsilon(1e-5)) == pytest.approx(float(optimizer.epsilon(1e-5)), rel=1e-9)
    assert found.report(1e-5).bounds[0] == found.epsilon(1e-5)
