"""Ledgers that were emptied, cut or forged, and files that are none: a LedgerError each, and never a smaller ε."""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch

from edpsgd import Ledger, LedgerError, cli
from edpsgd.ledger import BLOCK
from tests.helpers.common import Bag, private
from tests.helpers.ledgers import charge, forged, stepped


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.begin_run({"clip_norm": 1.0})
    charge(ledger, 0, 3)
    charge(ledger, 1, 2)
    ledger.close()
    return path


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


def test_the_folder_is_on_disk_also_if_another_process_made_the_file(tmp_path, monkeypatch) -> None:
    """A process that died right after it made the file has not told the disk of its name."""
    path = tmp_path / "ledger.jsonl"
    path.touch()
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd))[1])
    Ledger(path)
    assert os.stat(tmp_path).st_ino in synced


def test_two_writers_are_refused(tmp_path) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="in use by another"):
        private(Bag(), ledger=tmp_path / "ledger.jsonl")
    optimizer.ledger.close()
    private(Bag(), ledger=tmp_path / "ledger.jsonl")


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


def test_a_forked_process_does_not_write(tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    charge(ledger, 0, 1)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    child = os.fork()
    if child == 0:
        status = 2
        for write in (lambda: ledger.charge(1.0), lambda: ledger.open_epoch(1)):  # the first needs no line of its own
            try:
                write()
            except LedgerError:
                status -= 1
        atexit._run_exitfuncs()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    charge(ledger, 1, 1)
    ledger.close()
    assert [e.steps for e in Ledger.read(tmp_path / "ledger.jsonl").events] == [1, 1]


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_an_interrupt_while_writing_leaves_a_file_that_can_be_read(tmp_path, monkeypatch, where) -> None:
    path, model = tmp_path / "ledger.jsonl", Bag()
    optimizer = private(model, ledger=path)
    optimizer.set_epoch(0)
    real = getattr(os, where)

    def interrupted(*arguments) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert all(p.abs().sum() == 0 for p in model.parameters())
    optimizer.set_epoch(1)
    optimizer.step()
    optimizer.ledger.close()
    assert [event.steps for event in Ledger.read(path).events if event.epoch == 1] == [1]


@pytest.mark.parametrize("what", ["gone", "another"])
@pytest.mark.parametrize("steps", [1, BLOCK])
def test_a_file_that_was_moved_or_replaced_stops_the_training(tmp_path, what, steps) -> None:
    """Within the block that was reserved, and after it; nobody would look for the charges in the old file."""
    path, model = tmp_path / "ledger.jsonl", Bag((5,))
    optimizer = private(model, ledger=path)
    for _ in range(steps):
        optimizer.step()
    path.rename(tmp_path / "moved")
    if what == "another":
        path.write_bytes(b"")
    before = model.p0.detach().clone()
    with pytest.raises(OSError, match="was moved, deleted or replaced while it is in use"):
        optimizer.step()
    assert torch.equal(model.p0, before)
    del optimizer
    gc.collect()  # nor is that an error
    assert not path.exists() or path.read_bytes() == b""


def test_a_line_that_a_run_is_writing_is_not_there_yet(tmp_path) -> None:
    """Who reads beside it sees the lines before; when nobody writes any more, the file was cut."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    charge(ledger, 0, 1)
    with open(path, "ab") as file:
        file.write(b'{"index": 1')
    assert Ledger.read(path).events[0].steps == BLOCK
    left = Path(shutil.copy(path, tmp_path / "left.jsonl"))
    for read in (Ledger.read, Ledger):
        with pytest.raises(LedgerError, match="ends in the middle of a line"):
            read(left)
