"""What a ledger holds, and which of two ledgers is the later state of the other."""

from __future__ import annotations

import errno
import os

import pytest

import edpsgd
from edpsgd import Ledger, LedgerError
from edpsgd.ledger import BLOCK, Event
from edpsgd.ledger.content import Content
from edpsgd.ledger.records import RunRecord
from tests.helpers.common import Bag, private
from tests.helpers.ledgers import event, forged, stepped


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


@pytest.mark.parametrize("lines", [0, 1, 2, 3])
def test_a_cut_ledger_is_noticed_when_the_checkpoint_knows_more(tmp_path, lines) -> None:
    """Lines: the run, the event, its reservation, the next, the exact count."""
    path = tmp_path / "ledger.jsonl"
    optimizer = stepped(path, BLOCK + 2)
    checkpoint = optimizer.state_dict()
    optimizer.ledger.close()
    written = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(written[:lines]))
    resumed = private(Bag((5,)), ledger=path)
    with pytest.raises(LedgerError, match="holds less than the checkpoint"):
        resumed.load_state_dict(checkpoint)


def test_a_whole_ledger_and_a_new_one_take_the_checkpoint(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    optimizer = stepped(path, BLOCK + 2)
    checkpoint = optimizer.state_dict()
    optimizer.ledger.close()
    for place in (path, tmp_path / "new.jsonl"):
        resumed = private(Bag((5,)), ledger=place)
        resumed.load_state_dict(checkpoint)
        assert sum(e.steps for e in resumed.ledger.events) == BLOCK + 2


def test_a_checkpoint_that_could_not_be_written_into_a_new_file_changes_nothing(tmp_path, monkeypatch) -> None:
    """Else the next event would have a number that the file cannot have."""
    checkpoint = stepped(tmp_path / "old.jsonl", 3).state_dict()
    path = tmp_path / "new.jsonl"
    resumed = private(Bag((5,)), ledger=path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="cannot be written"):
        resumed.load_state_dict(checkpoint)
    monkeypatch.undo()
    resumed.set_epoch(1)
    resumed.step()
    resumed.ledger.close()
    assert [e.steps for e in Ledger.read(path).events] == [1]


@pytest.mark.parametrize(
    "record",
    [
        {"index": -1, "event": event()["event"]},
        {"index": 7, "event": event()["event"]},
        {"index": True, "event": event()["event"]},
        {"index": 0, "event": []},
        {"run": ["id"]},
        {"run": {"id": 3}},
        {"run": {"id": "a", "workers": "2"}},
        {"run": {"id": "a", "batches": "poisson"}},
        {"state": []},
        {"state": {"format": 1, "runs": {}, "events": []}},
        {"state": {"format": 9, "runs": [], "events": []}},
        {"something": 1},
        {},
    ],
)
def test_entries_that_no_run_writes_are_refused(tmp_path, record) -> None:
    path = forged(tmp_path / "ledger.jsonl", {"run": {"id": "a"}}, event(), record)
    with pytest.raises(LedgerError, match="line 3: "):
        Ledger.read(path)


@pytest.mark.parametrize("lost", [0, 1])
def test_only_a_ledger_without_lost_steps_continues_an_event(tmp_path, lost) -> None:
    """Steps that the checkpoint does not know of run again, on the same examples: their term is paid again."""
    path = tmp_path / "ledger.jsonl"
    ledger = edpsgd.Ledger(path)
    ledger.begin_run({})
    ledger.open_epoch(3, "shuffled")
    for _ in range(5):
        ledger.charge(1.0)
    state = ledger.state_dict()
    for _ in range(lost):
        ledger.charge(1.0)
    ledger.close()
    resumed = edpsgd.Ledger(path)
    resumed.begin_run({})
    resumed.load_state_dict(state)
    resumed.continue_epoch(3, "shuffled")
    resumed.charge(1.0)
    assert [e.steps for e in resumed.events] == ([6] if lost == 0 else [6, 1])
    resumed.close()
    assert edpsgd.Ledger.read(path).events == resumed.events


def test_after_a_crash_the_reserved_steps_count_and_a_new_event_begins(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = edpsgd.Ledger(path)
    ledger.begin_run({})
    ledger.open_epoch(0, "shuffled")
    ledger.charge(1.0)
    state = ledger.state_dict()
    ledger._file.close()  # as a kill does: nothing more is written
    ledger._file = None
    resumed = edpsgd.Ledger(path)
    resumed.load_state_dict(state)
    resumed.continue_epoch(0, "shuffled")
    resumed.charge(1.0)
    assert [e.steps for e in resumed.events] == [edpsgd.ledger.BLOCK, 1]


@pytest.mark.parametrize(
    ("epoch", "batching", "rate"), [(1, "shuffled", None), (0, "poisson", 0.1), (0, "poisson", 0.2)]
)
def test_another_epoch_or_rate_is_another_event(epoch, batching, rate) -> None:
    ledger = edpsgd.Ledger()
    kind = ("poisson", 0.3) if batching == "poisson" else ("shuffled", None)
    ledger.open_epoch(0, *kind)
    ledger.charge(1.0)
    resumed = edpsgd.Ledger()
    resumed.load_state_dict(ledger.state_dict())
    resumed.continue_epoch(epoch, batching, rate)
    resumed.charge(1.0)
    assert [e.steps for e in resumed.events] == [1, 1]


def content(*steps: int, runs: tuple[str, ...] = ("a",), **first_run: object) -> Content:
    """Events of epochs 0, 1, … with so many steps each."""
    records = [RunRecord(id=name, **(first_run if place == 0 else {})) for place, name in enumerate(runs)]
    events = [Event("gradients", epoch, 1.0, number) for epoch, number in enumerate(steps)]
    return Content(records, events)


@pytest.mark.parametrize(
    ("later", "earlier", "continues"),
    [
        (content(3, 2), content(3, 2), True),
        (content(3, 2), content(3), True),
        (content(4), content(3), True),
        (content(3), content(4), False),
        (content(3), content(3, 0), False),
        (content(3, runs=("a", "b")), content(3), True),
        (content(3), content(3, runs=("a", "b")), False),
        (content(3, runs=("b",)), content(3), False),
        (content(3), Content(), True),
    ],
)
def test_what_continues_what(later, earlier, continues) -> None:
    assert later.continues(earlier) == continues


def test_a_run_that_branched_off_before_does_not_continue() -> None:
    for begins_after, continues in (((1, 3), True), ((1, 2), False), ((0, 3), False), (None, True)):
        later = content(3, 1)
        later.runs.append(RunRecord(id="b", begins_after=begins_after))
        assert later.continues(content(3)) == continues


def test_only_the_same_run_can_have_lost_steps() -> None:
    assert content(3).lacks_steps_of(content(4))
    assert content(3).lacks_steps_of(content(3, 1))
    assert not content(3).lacks_steps_of(content(3))
    assert not content(3).lacks_steps_of(content(4, runs=("b",)))


def test_runs_that_only_the_other_has_begin_at_the_end() -> None:
    joined = content(3, 2).followed_by(content(1, runs=("a", "b")))
    assert [(run.id, run.begins_after) for run in joined.runs] == [("a", None), ("b", (2, 5))]
    assert [event.steps for event in joined.events] == [3, 2]
    assert Content.parse(joined.to_json()) == joined
