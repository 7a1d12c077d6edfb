"""The ledger: what was released, as plain, append-only data. Accounting reads it and nothing else.

An event is a pass over the data: the steps between two calls of set_epoch, under one noise multiplier (the real one,
after all factors of privacy.md section 3). If set_epoch was never called, nobody has said that the steps of an event
use different examples, and its epoch is None: every step then counts as a pass of its own.

With a file, an entry is on disk before the release that it pays for can reach any model (privacy.md section 8). Steps
are reserved in blocks: a crash may count a few steps that never happened, it never misses one that did.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import uuid
import warnings
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
BLOCK = 32


class LedgerError(ValueError):
    """A ledger that cannot be read, or that does not belong to the run."""


@dataclass
class Event:
    """One entry.

    Attributes:
        kind: "gradients" (steps of training) or "layer_norms" (scales measured in a first step).
        epoch: what set_epoch said, None if it was not called.
        noise_multiplier: noise std over sensitivity, the smallest in the event; 0 means that no noise covers it,
            None that nothing was released yet.
        steps: how many steps were released or, before a crash, reserved.
        batching: who says that no example is in two steps of the event; "unvouched" is the user's word.
    """

    kind: str
    epoch: int | None
    noise_multiplier: float | None = None
    steps: int = 0
    batching: str = "unvouched"


class Ledger:
    """Privacy events in the order in which they happened.

    Attributes:
        runs: the settings of every run that wrote here, oldest first, each with an "id".
        events: what was released.

    Example:
        >>> ledger = Ledger()
        >>> ledger.open_epoch(0)
        >>> ledger.charge(0.8)
        >>> ledger.events[0].steps
        1
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Makes a ledger in memory or, with a path, one that is kept in a file and continues what the file holds."""
        self.runs: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self._current: int | None = None
        self._reserved = 0
        self._is_closed = False
        self._file = None if path is None else _LedgerFile(Path(path))
        if self._file is not None:
            self._replay(self._file.records)
            atexit.register(_close_at_exit, weakref.ref(self))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """What a file holds, in memory; also of a run that is still writing."""
        ledger = cls()
        ledger._replay(_read_records(Path(path))[0])
        return ledger

    def begin_run(self, settings: dict[str, Any], run_id: str | None = None) -> None:
        """Notes the settings of a run that is about to write here. Workers of one run share the id."""
        self.runs.append({"id": run_id or uuid.uuid4().hex, **settings})
        self._current = None
        self._write({"run": self.runs[-1]})

    @property
    def is_open(self) -> bool:
        """Whether an event is open for steps to come."""
        return self._current is not None

    def open_epoch(self, epoch: int | None) -> None:
        """Opens an event for the steps to come, also for an epoch that was seen before."""
        self._end_event()
        self._current = self._append(Event("gradients", epoch))

    def charge(self, noise_multiplier: float) -> None:
        """Pays for one step of the open event, before it is released."""
        if self._current is None:
            raise LedgerError("no event is open: call open_epoch() first")
        event = self.events[self._current]
        event.steps += 1
        lower = event.noise_multiplier is None or noise_multiplier < event.noise_multiplier
        if lower:
            event.noise_multiplier = noise_multiplier
        if lower or event.steps > self._reserved:
            self._reserved = 0  # if the write fails, the next charge writes again
            self._write_event(self._current, event.steps - 1 + BLOCK, durable=True)
            self._reserved = event.steps - 1 + BLOCK

    def charge_layer_norms(self, noise_multiplier: float) -> None:
        """Pays for layer scales measured in a first step; 0 marks raw norms, which no noise covers."""
        self._append(Event("layer_norms", None, noise_multiplier, steps=1), durable=True)

    def state_dict(self) -> dict[str, Any]:
        """The whole ledger as JSON-ready data."""
        return {
            "format": FORMAT,
            "runs": [dict(run) for run in self.runs],
            "events": [asdict(event) for event in self.events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the ledger of a checkpoint, or keeps this one where it knows of more: what was released stays so."""
        if state.get("format") != FORMAT:
            raise LedgerError(
                f"the checkpoint's ledger has format {state.get('format')!r}, this version reads {FORMAT}"
            )
        self._end_event()
        other = Ledger()
        other.runs = [dict(run) for run in state["runs"]]
        other.events = [Event(**event) for event in state["events"]]
        if self._is_unused() or other._continues(self):
            self._adopt(other)
        elif not self._continues(other):
            where = "" if self._file is None else f" {self._file.path}"
            raise LedgerError(
                f"the ledger{where} and the checkpoint's come from different runs, and neither continues the other. "
                "Load the checkpoint into a new optimizer, with the ledger file of its own run or a new one."
            )

    def close(self) -> None:
        """Writes the exact step count and lets go of the file, which then takes no more charges; done at exit too."""
        if self._file is not None and not self._is_closed:
            self._end_event()
            self._is_closed = True
            self._file.close()

    def _is_unused(self) -> bool:
        return not any(event.steps for event in self.events)

    def _continues(self, other: Ledger) -> bool:
        """Whether this is the other ledger, perhaps some steps, events and runs later."""
        ids = [run["id"] for run in other.runs]
        if [run["id"] for run in self.runs[: len(ids)]] != ids or len(self.events) < len(other.events):
            return False
        return all(_at_least(mine, theirs) for mine, theirs in zip(self.events, other.events, strict=False))

    def _adopt(self, other: Ledger) -> None:
        known = {run["id"] for run in other.runs}
        own = [run for run in self.runs if run["id"] not in known]
        self.runs, self.events = other.runs + own, other.events
        self._write({"state": self.state_dict()}, durable=True)

    def _append(self, event: Event, durable: bool = False) -> int:
        index = len(self.events)
        self._write({"index": index, "event": asdict(event)}, durable)
        self.events.append(event)
        return index

    def _end_event(self) -> None:
        """Closes the open event, and replaces the steps reserved for it by those that happened."""
        index, reserved = self._current, self._reserved
        self._current, self._reserved = None, 0
        if index is not None and reserved > self.events[index].steps:
            self._write_event(index, self.events[index].steps)

    def _write_event(self, index: int, steps: int, durable: bool = False) -> None:
        self._write({"index": index, "event": {**asdict(self.events[index]), "steps": steps}}, durable)

    def _write(self, record: dict[str, Any], durable: bool = False) -> None:
        if self._is_closed:
            raise LedgerError(
                f"{self._file.path if self._file else 'the ledger'} was closed: nothing more can be charged"
            )
        if self._file is not None:
            self._file.append(record, durable)

    def _replay(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            if "state" in record:
                self.runs = record["state"]["runs"]
                self.events = [Event(**event) for event in record["state"]["events"]]
            elif "run" in record:
                self.runs.append(record["run"])
            else:
                self.events[record["index"] :] = [Event(**record["event"]), *self.events[record["index"] + 1 :]]

    def __getstate__(self) -> dict[str, Any]:
        if self._file is not None:
            warnings.warn(
                f"a copy of the ledger {self._file.path} is in memory only: the file stays with the original",
                stacklevel=2,
            )
        return {**self.__dict__, "_file": None, "_is_closed": False}


def _close_at_exit(reference: weakref.ref[Ledger]) -> None:
    ledger = reference()
    if ledger is not None and ledger._file is not None and ledger._file.is_own:
        ledger.close()


def _at_least(event: Event, earlier: Event) -> bool:
    same = (event.kind, event.epoch, event.batching) == (earlier.kind, earlier.epoch, earlier.batching)
    if earlier.noise_multiplier is None:
        return same
    return same and event.steps >= earlier.steps and (event.noise_multiplier or 0.0) <= earlier.noise_multiplier


class _LedgerFile:
    """Lines of JSON, each with a digest of itself and of all before it, appended and never rewritten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = os.getpid()
        is_new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)
        try:
            _lock(descriptor, path)
            self.records, self._digest = _read_records(path)
        except LedgerError:
            self._file.close()
            raise
        if is_new:
            _sync_folder(path.parent)

    @property
    def is_own(self) -> bool:
        """Whether this process opened the file; a forked one must not write into it."""
        return self._process == os.getpid()

    def append(self, record: dict[str, Any], durable: bool) -> None:
        """Adds one line; if durable, returns only when it is on disk."""
        if not self.is_own:
            raise LedgerError(f"{self.path} belongs to the process that this one was forked from")
        digest = _chain(self._digest, record)
        line = json.dumps({**record, "digest": digest}).encode() + b"\n"
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        try:
            while line:
                line = line[os.write(descriptor, line) :]
            if durable:
                os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)  # no half line, so that the file stays readable
            reason = f"the privacy ledger cannot be written, so the step was not released ({error.strerror})"
            raise OSError(error.errno, reason, str(self.path)) from error
        self._digest = digest

    def close(self) -> None:
        self._file.close()


def _read_records(path: Path) -> tuple[list[dict[str, Any]], str]:
    """All entries, and the digest of the last."""
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        raise LedgerError(
            f"{path} ends in the middle of a line: it was cut, or the machine failed while writing. Nothing was "
            "changed. If only the end of the last line is missing, delete that line: its step never happened."
        )
    records, digest = [], ""
    for number, line in enumerate(lines, 1):
        try:
            record: dict[str, Any] = json.loads(line)
            written = record.pop("digest")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise LedgerError(f"{path}, line {number}: not a ledger entry. Nothing was changed.") from error
        digest = _chain(digest, record)
        if written != digest:
            raise LedgerError(f"{path}, line {number}: the checksum does not match. Nothing was changed.")
        records.append(record)
    return records, digest


def _chain(previous: str, record: dict[str, Any]) -> str:
    return hashlib.sha256((previous + json.dumps(record, sort_keys=True)).encode()).hexdigest()[:16]


def _lock(fd: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # a platform without advisory locks
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise LedgerError(f"{path} is in use by another optimizer or process") from error


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
