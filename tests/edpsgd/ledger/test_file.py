"""Ledgers that were emptied, cut or forged, and files that are none: a LedgerError each, and never a smaller ε."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest
import torch

from edpsgd import Ledger, LedgerError, cli
from edpsgd.ledger import BLOCK
from edpsgd.ledger.events import Event
from edpsgd.ledger.file import _chain
from tests.helpers.common import Bag, private


def forged(path: Path, *records: dict) -> Path:
    """Lines with the right checksums."""
    digest = ""
    with open(path, "w") as file:
        for record in records:
            digest = _chain(digest, record)
            file.write(json.dumps({**record, "digest": digest}) + "\n")
    return path


def event(**values: object) -> dict:
    full = {"kind": "gradients", "epoch": 0, "noise_multiplier": 1.0, "steps": 3, "batching": "shuffled"}
    return {"index": 0, "event": {**full, "sampling_rate": None, **values}}


def stepped(path: Path, steps: int):
    optimizer = private(Bag((5,)), ledger=path)
    optimizer.set_epoch(0)
    for _ in range(steps):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("steps", [1, BLOCK])
@pytest.mark.parametrize("left", ["nothing", "a line less", "a line more"])
def test_a_file_that_changes_while_it_is_in_use_stops_the_training(tmp_path, steps, left) -> None:
    """Within the block that was reserved, and after it."""
    path = tmp_path / "ledger.jsonl"
    optimizer = stepped(path, steps)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = {"nothing": [], "a line less": lines[:-1], "a line more": [*lines, lines[-1]]}[left]
    with open(path, "r+b") as file:  # the same file, in place
        file.truncate(0)
        file.write(b"".join(kept))
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    with pytest.raises(LedgerError, match="was changed while it is in use"):
        optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)
    assert path.read_bytes() == b"".join(kept)


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


WRONG = {
    "steps": [-5, 1.5, True, 2**60, 10**400, float("nan"), "3", None],
    "noise_multiplier": [-1.0, float("nan"), float("inf"), True, "1", 10**400],
    "sampling_rate": [-0.1, 1.5, float("nan"), True, "0.1"],
    "epoch": [1.5, True, "0"],
    "kind": ["nothing", 3, ["gradients"]],
    "batching": [None, 3, "shuffled\x1b[2J"],
    "more": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_values_that_no_run_writes_are_refused(tmp_path, name, value) -> None:
    path = forged(tmp_path / "ledger.jsonl", {"run": {"id": "a"}}, event(), event(**{name: value}))
    for read in (Ledger.read, Ledger):
        with pytest.raises(LedgerError, match="line 3: an event has"):
            read(path)
    state = {"format": 1, "runs": [], "events": [event(**{name: value})["event"]]}
    with pytest.raises(LedgerError, match="an event has"):
        Ledger().load_state_dict(state)


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


@pytest.mark.parametrize("depth", [30, 500, 100_000])
def test_deep_json_is_refused(tmp_path, depth) -> None:
    nested = "[" * depth + "]" * depth
    path = tmp_path / "ledger.jsonl"
    if depth < 1000:
        forged(path, {"run": {"id": "a", "x": json.loads(nested)}})
    else:
        path.write_text(f'{{"run": {{"id": "a", "x": {nested}}}, "digest": "0"}}\n')
    with pytest.raises(LedgerError, match="line 1: "):
        Ledger.read(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, _socket], ids=["FIFO", "folder", "socket"])
def test_what_is_no_file_is_refused_at_once(tmp_path, make, capsys) -> None:
    path = tmp_path / "ledger.jsonl"
    make(path)
    for read in (Ledger.read, Ledger):
        with pytest.raises(LedgerError, match="must be a regular file"):
            read(path)
    if make is os.mkfifo:
        assert cli.main(["card", str(tmp_path), "--delta", "1e-5"]) == 2
        assert "must be a regular file" in capsys.readouterr().err


def test_a_device_that_forgets_is_no_ledger() -> None:
    with pytest.raises(LedgerError, match="must be a regular file"):
        private(Bag(), ledger="/dev/null")


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_a_multiplier_that_hides_behind_another_is_refused(value) -> None:
    ledger = Ledger()
    ledger.open_epoch(0)
    ledger.charge(1.0)
    with pytest.raises(LedgerError, match="noise multiplier must be"):
        ledger.charge(value)
    assert ledger.events == [Event("gradients", 0, 1.0, 1)]


def test_the_folder_is_on_disk_also_if_another_process_made_the_file(tmp_path, monkeypatch) -> None:
    """A process that died right after it made the file has not told the disk of its name."""
    path = tmp_path / "ledger.jsonl"
    path.touch()
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd))[1])
    Ledger(path)
    assert os.stat(tmp_path).st_ino in synced
