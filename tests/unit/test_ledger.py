"""The ledger, in memory and on disk."""

from __future__ import annotations

import errno
import json
import os
import pickle

import pytest
import torch

import edpsgd
from edpsgd.ledger import BLOCK, Event, Ledger, LedgerError
from tests.common import Bag, private


def steps_in(path) -> list[int]:
    """What somebody who finds the file after a crash would count."""
    found: dict[int, int] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "event" in record:
            found[record["index"]] = record["event"]["steps"]
    return [found[index] for index in sorted(found)]


def charge(ledger: Ledger, epoch: int | None, steps: int, z: float = 1.0) -> None:
    ledger.open_epoch(epoch)
    for _ in range(steps):
        ledger.charge(z)


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
    assert len({run["id"] for run in ledger.runs}) == 3
    assert ledger.runs[0]["clip_norm"] == 1.0
    assert ledger.runs[0]["workers"] == 1


def test_resume_takes_the_larger_count(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    optimizer = private(Bag(), ledger=path)
    optimizer.set_epoch(0)
    optimizer.step()
    checkpoint = optimizer.state_dict()
    for _ in range(3):
        optimizer.step()
    optimizer.ledger.close()
    resumed = private(Bag(), ledger=path)
    resumed.load_state_dict(checkpoint)
    assert [e.steps for e in resumed.ledger.events] == [4]
    resumed.set_epoch(0)
    resumed.step()
    assert [e.steps for e in resumed.ledger.events] == [4, 1]
    later = resumed.state_dict()
    resumed.ledger.close()
    third = private(Bag(), ledger=path)
    third.load_state_dict(later)
    assert [e.steps for e in third.ledger.events] == [4, 1]


def test_a_new_file_starts_from_the_checkpoint(tmp_path) -> None:
    optimizer = private(Bag())
    optimizer.set_epoch(0)
    optimizer.step()
    resumed = private(Bag(), ledger=tmp_path / "new.jsonl")
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step()  # epoch 0 goes on, in an event of its own
    resumed.ledger.close()
    assert Ledger.read(tmp_path / "new.jsonl").events == [Event("gradients", 0, 1.0, 1)] * 2
    again = private(Bag(), ledger=tmp_path / "new.jsonl")
    again.load_state_dict(resumed.state_dict())
    assert len(again.ledger.events) == 2


def test_going_back_to_a_checkpoint_forgets_nothing() -> None:
    optimizer = private(Bag())
    optimizer.set_epoch(0)
    optimizer.step()
    checkpoint = optimizer.state_dict()
    optimizer.step()
    optimizer.load_state_dict(checkpoint)
    assert sum(e.steps for e in optimizer.ledger.events) == 2


def test_the_ledger_of_another_run_is_refused(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    first, second = private(Bag(), ledger=path), private(Bag())
    for optimizer in (first, second):
        optimizer.set_epoch(0)
        optimizer.step()
    first.ledger.close()
    before = path.read_bytes()
    resumed = private(Bag(), ledger=path)
    with pytest.raises(LedgerError, match="come from different runs"):
        resumed.load_state_dict(second.state_dict())
    assert path.read_bytes().startswith(before)
    assert [e.steps for e in resumed.ledger.events] == [1]


def test_two_writers_are_refused(tmp_path) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="in use by another"):
        private(Bag(), ledger=tmp_path / "ledger.jsonl")
    optimizer.ledger.close()
    private(Bag(), ledger=tmp_path / "ledger.jsonl")


def test_copies_leave_the_file_to_the_original(tmp_path) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    optimizer.step()
    with pytest.warns(UserWarning, match="in memory only"):
        twin = pickle.loads(pickle.dumps(optimizer))
    size = (tmp_path / "ledger.jsonl").stat().st_size
    twin.step()
    assert (tmp_path / "ledger.jsonl").stat().st_size == size
    assert sum(e.steps for e in twin.ledger.events) == 2


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.begin_run({"clip_norm": 1.0})
    charge(ledger, 0, 3)
    charge(ledger, 1, 2)
    ledger.close()
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-5], "ends in the middle of a line"),
        (lambda text: text.replace(b'"epoch": 1', b'"epoch": 7'), "line 5: the checksum does not match"),
        (lambda text: b"".join(text.splitlines(keepends=True)[1:]), "line 1: the checksum does not match"),
        (lambda text: text + b"steps\n", "line 8: not a ledger entry"),
        (lambda text: b"[1]\n", "line 1: not a ledger entry"),
    ],
    ids=["cut", "changed", "line removed", "not JSON", "not an entry"],
)
def test_damage_is_noticed_and_nothing_overwritten(written, damage, message) -> None:
    broken = damage(written.read_bytes())
    written.write_bytes(broken)
    with pytest.raises(LedgerError, match=message):
        private(Bag(), ledger=written)
    with pytest.raises(LedgerError, match=message):
        Ledger.read(written)
    assert written.read_bytes() == broken


def test_a_full_disk_stops_the_step_before_it_is_released(tmp_path, monkeypatch) -> None:
    model, path = Bag(), tmp_path / "ledger.jsonl"
    optimizer = private(model, ledger=path)
    optimizer.set_epoch(0)
    before, real = path.read_bytes(), os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 20:
            return real(fd, data[:20])  # as much as there is room for
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="the step was not released"):
        optimizer.step()
    monkeypatch.undo()
    assert all(p.abs().sum() == 0 for p in model.parameters())
    assert path.read_bytes() == before
    optimizer.step()
    optimizer.ledger.close()
    assert sum(e.steps for e in Ledger.read(path).events) == 2  # the failed one counts, it may have been written


def test_what_the_ledger_marks() -> None:
    optimizer = private(Bag(), seed=3, layer_scaling=edpsgd.FirstStepNorms())
    optimizer.step()
    assert optimizer.ledger.runs[0]["seeded"]
    assert optimizer.ledger.events == [Event("layer_norms", None, 0.0, 1)]
    assert json.loads(json.dumps(optimizer.ledger.state_dict())) == optimizer.ledger.state_dict()
    example = private(Bag(), unit="example", divisor=4)
    example.set_epoch(0)
    assert example.ledger.runs[0]["unit"] == "example"
    assert example.ledger.events[0].batching == "unvouched"
