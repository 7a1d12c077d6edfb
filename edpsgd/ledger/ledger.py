"""The ledger: what was released, as plain, append-only data. Accounting reads it and nothing else.

An event is a pass over the data: the steps between two calls of set_epoch, under one noise multiplier (the real one,
after all factors of privacy.md section 3). If set_epoch was never called, nobody has said that the steps of an event
use different examples, and its epoch is None: every step then counts as a pass of its own.

With a file, an entry is on disk before the release that it pays for can reach any model (privacy.md section 8). Steps
are reserved in blocks: a crash may count a few steps that never happened, it never misses one that did.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import uuid
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edpsgd.accounting.pld import Composition
from edpsgd.ledger import guarantee
from edpsgd.ledger.events import Event, LedgerError, LedgerUnavailable, family, is_noise
from edpsgd.ledger.file import LedgerFile, read_records
from edpsgd.ledger.guarantee import Bound, Report
from edpsgd.ledger.records import RunRecord

FORMAT = 1
BLOCK = 32


class Ledger:
    """Privacy events in the order in which they happened.

    Attributes:
        runs: the record of every run that wrote here, oldest first.
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
        self.runs: list[RunRecord] = []
        self.events: list[Event] = []
        self._current: int | None = None
        self._reserved = 0
        self._is_closed = False
        self._is_level = False
        self._composition: Composition | None = None
        self._file = None if path is None else LedgerFile(Path(path))
        if self._file is not None:
            try:
                self._replay(self._file.records, self._file.path)
            except BaseException:
                self._file.close()
                raise
            atexit.register(_close_at_exit, weakref.ref(self))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """What a file holds, in memory; also of a run that is still writing."""
        ledger = cls()
        ledger._replay(read_records(Path(path))[0], Path(path))
        return ledger

    def begin_run(self, settings: RunRecord | Mapping[str, Any], run_id: str | None = None) -> None:
        """Notes the settings of a run that is about to write here. Workers of one run share the id."""
        run = settings if isinstance(settings, RunRecord) else RunRecord.from_settings(settings)
        guarantee.unit_of([*self.runs, run])  # refuses another one than before
        self._current = None
        self._note(replace(run, id=run.id or run_id or uuid.uuid4().hex))

    def begin_branch(self, settings: RunRecord | Mapping[str, Any], name: str) -> None:
        """The same for what goes on from here beside another one, such as a copy; alike on workers with one name."""
        self.begin_run(settings, _derived_id(self.runs[-1].id, name))

    def note_change(self, settings: Mapping[str, Any]) -> None:
        """Notes that some settings of the last run have changed; its open event goes on."""
        last = self.runs[-1] if self.runs else RunRecord(id=uuid.uuid4().hex)
        told = json.dumps(settings, sort_keys=True, default=repr)
        place = {"id": _derived_id(last.id, told), "changes": last.id}
        self._note(RunRecord.from_settings({**last.to_json(), **settings, **place}))

    def _note(self, run: RunRecord) -> None:
        placed = replace(run, begins_after=self._end())
        self._write({"run": placed.to_json()}, durable=True)  # conditions of ε depend on it
        self.runs.append(placed)

    def _end(self) -> tuple[int, int]:
        """How many events there are, and steps in all of them: where a run that begins now branches off.

        The open event need not be the last: measured scales are written behind it.
        """
        return len(self.events), sum(event.steps for event in self.events)

    @property
    def is_open(self) -> bool:
        """Whether an event is open for steps to come."""
        return self._current is not None

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more entries."""
        return self._is_closed

    @property
    def open_event(self) -> Event | None:
        """The event that steps to come belong to, if one is open."""
        return None if self._current is None else self.events[self._current]

    def open_epoch(self, epoch: int | None, batching: str = "unvouched", sampling_rate: float | None = None) -> None:
        """Opens an event for the steps to come, also for an epoch that was seen before."""
        others = {e.batching for e in self.events if e.kind == "gradients" and e.steps}
        if any(family(other) != family(batching) for other in others):
            raise LedgerError(
                f"the ledger holds {' and '.join(sorted(others))} batches, and {batching} ones speak of other "
                "neighbours: they cannot be accounted together. Use a new ledger, with an ε of its own"
            )
        self.end_event()
        self._is_level = False
        self._current = self._append(Event("gradients", epoch, batching=batching, sampling_rate=sampling_rate))

    def continue_epoch(self, epoch: int | None, batching: str, sampling_rate: float | None = None) -> None:
        """Goes on with the last event after a checkpoint was loaded, or opens a new one.

        For samplers that vouch for it. It is a new one if the ledger knows of steps that the checkpoint does not: these
        are run again, on the same examples.
        """
        last = max((i for i, e in enumerate(self.events) if e.kind == "gradients"), default=None)
        if (
            last is None
            or not self._is_level
            or _kind(self.events[last]) != ("gradients", epoch, batching, sampling_rate)
        ):
            return self.open_epoch(epoch, batching, sampling_rate)
        self.end_event()
        self._current, self._reserved, self._is_level = last, self.events[last].steps, False

    def charge(self, noise_multiplier: float) -> None:
        """Pays for one step of the open event, before it is released."""
        if self._current is None:
            raise LedgerError("no event is open: call open_epoch() first")
        _check_noise(noise_multiplier)
        event = self.events[self._current]
        event.steps += 1
        lower = event.noise_multiplier is None or noise_multiplier < event.noise_multiplier
        if lower:
            event.noise_multiplier = noise_multiplier
        if lower or event.steps > self._reserved:
            self._reserved = 0  # if the write fails, the next charge writes again
            self._write_event(self._current, event.steps - 1 + BLOCK, durable=True)
            self._reserved = event.steps - 1 + BLOCK
        elif self._file is not None:
            self._file.check()

    def charge_layer_norms(self, noise_multiplier: float) -> None:
        """Pays for layer scales measured in a first step; 0 marks raw norms, which no noise covers."""
        _check_noise(noise_multiplier)
        self._append(Event("layer_norms", None, noise_multiplier, steps=1), durable=True)

    def epsilon(self, delta: float, events: Sequence[Event] | None = None) -> Bound:
        """The tightest sound ε for what was recorded, with its conditions; or for other events of the same runs.

        Asked after every epoch, it takes up where it left off.

        Example:
            >>> ledger = Ledger()
            >>> ledger.open_epoch(0, "shuffled")
            >>> ledger.charge(1.0)
            >>> round(float(ledger.epsilon(1e-5)), 4)
            4.3772
        """
        self._composition = self._composition or Composition()
        return guarantee.bound(self.events if events is None else events, delta, self.runs, self._composition)

    def report(self, delta: float) -> Report:
        """All methods side by side, and what ε would be if every example were in every step."""
        self._composition = self._composition or Composition()
        return guarantee.report(self.events, delta, self.runs, self._composition)

    def state_dict(self) -> dict[str, Any]:
        """The whole ledger as JSON-ready data."""
        return {
            "format": FORMAT,
            "runs": [run.to_json() for run in self.runs],
            "events": [asdict(event) for event in self.events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the ledger of a checkpoint, or keeps this one where it knows of more: what was released stays so."""
        other = Ledger()
        other.runs, other.events = _parsed(state)
        self._check_rollback(other)
        guarantee.unit_of([*self.runs, *other.runs])
        has_less = self._is_unused() or other._continues(self)
        if not (has_less or self._continues(other)):
            where = "" if self._file is None else f" {self._file.path}"
            raise LedgerError(
                f"the ledger{where} and the checkpoint's come from different runs, and neither continues the other. "
                "Load the checkpoint into a new optimizer, with the ledger file of its own run or a new one."
            )
        self.end_event()
        if has_less:
            self._adopt(other)
        self._is_level = self.events == other.events

    def _check_rollback(self, other: Ledger) -> None:
        """An entry is in the file before its step is released: a file that knows less than a checkpoint has lost some.

        How many were behind those that the checkpoint knows, nobody can tell.
        """
        if self._file is None or other._is_unused():
            return
        known = {run.id for run in other.runs}
        is_same = any(run.id in known for run in self.runs)
        has_lost = is_same and not all(
            any(_at_least(mine, theirs) for mine in self.events[i : i + 1]) for i, theirs in enumerate(other.events)
        )
        if has_lost or self._file.was_emptied:
            raise LedgerError(
                f"the ledger {self._file.path} holds less than the checkpoint's: it was cut, or taken from an older "
                "copy, and steps after the checkpoint may be missing too; or the checkpoint is of another branch. "
                "Restore it. A new file, at a path where "
                "there is none, begins with the checkpoint's ledger: its ε lacks what came after the checkpoint"
            )

    def close(self) -> None:
        """Writes the exact step count and lets go of the file, which then takes no more charges; done at exit too."""
        if not self._is_closed:
            try:
                self.end_event()
            finally:
                self._is_closed = True
                if self._file is not None:
                    self._file.close()

    def __del__(self) -> None:
        """A ledger that nobody holds any more gets no more charges: its exact step count can be written."""
        self._let_go()

    def _let_go(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None and file.is_own:
            with contextlib.suppress(OSError):  # then a few steps more are counted than happened
                self.close()

    def _is_unused(self) -> bool:
        return not any(event.steps for event in self.events)

    def _continues(self, other: Ledger) -> bool:
        """Whether this is the other ledger, perhaps some steps, events and runs later."""
        ids = [run.id for run in other.runs]
        if [run.id for run in self.runs[: len(ids)]] != ids or len(self.events) < len(other.events):
            return False
        following = self.runs[len(ids) : len(ids) + 1]
        begins_after = following[0].begins_after if following else None  # runs of old ledgers do not say
        if begins_after is not None and any(
            is_now > was for is_now, was in zip(other._end(), begins_after, strict=True)
        ):
            return False  # it branched off before: the other one has taken steps of its own since
        return all(_at_least(mine, theirs) for mine, theirs in zip(self.events, other.events, strict=False))

    def _adopt(self, other: Ledger) -> None:
        known = {run.id for run in other.runs}
        own = [replace(run, begins_after=other._end()) for run in self.runs if run.id not in known]
        adopted = Ledger()
        adopted.runs, adopted.events = other.runs + own, other.events
        self._write({"state": adopted.state_dict()}, durable=True)  # first: if it fails, nothing has changed
        self.runs, self.events = adopted.runs, adopted.events

    def _append(self, event: Event, durable: bool = False) -> int:
        index = len(self.events)
        self._write({"index": index, "event": asdict(event)}, durable)
        self.events.append(event)
        return index

    def end_event(self) -> None:
        """Closes the open event, and replaces the steps reserved for it by those that happened; what follows is new."""
        index, reserved = self._current, self._reserved
        self._current, self._reserved = None, 0
        if index is not None and reserved > self.events[index].steps:
            self._write_event(index, self.events[index].steps)

    def _write_event(self, index: int, steps: int, durable: bool = False) -> None:
        self._write({"index": index, "event": {**asdict(self.events[index]), "steps": steps}}, durable)

    def _write(self, record: dict[str, Any], durable: bool = False) -> None:
        if self._is_closed:
            raise LedgerUnavailable(
                f"{self._file.path if self._file else 'the ledger'} was closed: nothing more can be charged"
            )
        if self._file is not None:
            self._file.append(record, durable)

    def _replay(self, records: list[dict[str, Any]], path: Path) -> None:
        for number, record in enumerate(records, 1):
            try:
                self._replay_one(record)
            except LedgerError as error:
                raise LedgerError(f"{path}, line {number}: {error}. Nothing was changed.") from None

    def _replay_one(self, record: dict[str, Any]) -> None:
        """A right checksum says that a line is whole, not that a run can have written it."""
        if record.keys() == {"state"}:
            self.runs, self.events = _parsed(record["state"])
        elif record.keys() == {"run"}:
            self.runs.append(RunRecord.parse(record["run"]))
        elif record.keys() == {"index", "event"}:
            index, event = record["index"], Event.parse(record["event"])
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index <= len(self.events):
                raise LedgerError("an event has a place that it cannot have")
            self.events[index : index + 1] = [event]
        else:
            raise LedgerError("not an entry that this version can read")

    def __getstate__(self) -> dict[str, Any]:
        if self._file is not None:
            warnings.warn(
                f"a copy of the ledger {self._file.path} is in memory only: the file stays with the original",
                stacklevel=2,
            )
        return {**self.__dict__, "_file": None, "_is_closed": False, "_composition": None}


def _parsed(state: object) -> tuple[list[RunRecord], list[Event]]:
    """Runs and events of a state_dict, which may come from any file."""
    if not isinstance(state, Mapping):
        raise LedgerError("a ledger's state must have names and values")
    if state.get("format") != FORMAT:
        raise LedgerError(f"the ledger's state has format {state.get('format')!r}, this version reads {FORMAT}")
    runs, events = state.get("runs"), state.get("events")
    if not isinstance(runs, list) or not isinstance(events, list):
        raise LedgerError("a ledger's state must have a list of runs and one of events")
    return [RunRecord.parse(run) for run in runs], [Event.parse(event) for event in events]


def _derived_id(before: str, what: str) -> str:
    """Of a run that follows from another one: alike on all workers, and no other for anything else."""
    return hashlib.blake2b(f"{before}/{what}".encode(), digest_size=16).hexdigest()


def _check_noise(noise_multiplier: float) -> None:
    """NaN is below no other multiplier, and would hide behind the one before."""
    if not is_noise(noise_multiplier):
        raise LedgerError(f"a noise multiplier must be a finite number >= 0, got {noise_multiplier!r}")


def _close_at_exit(reference: weakref.ref[Ledger]) -> None:
    ledger = reference()
    if ledger is not None:
        ledger._let_go()


def _kind(event: Event) -> tuple[str, int | None, str, float | None]:
    return event.kind, event.epoch, event.batching, event.sampling_rate


def _at_least(event: Event, earlier: Event) -> bool:
    same = _kind(event) == _kind(earlier)
    if earlier.noise_multiplier is None:
        return same
    return same and event.steps >= earlier.steps and (event.noise_multiplier or 0.0) <= earlier.noise_multiplier
