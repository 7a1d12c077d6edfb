"""The ledger: what was released, as plain, append-only data. ε is of its events and nothing else (``guarantee``).

An event is a pass over the data, or a measurement of layer scales. A pass is the steps between two calls of set_epoch,
under one noise multiplier (the real one, after all factors of privacy.md section 3). If set_epoch was never called,
nobody has said that the steps of an event use different examples, and its epoch is None: every step then counts as a
pass of its own.

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
from edpsgd.ledger.content import Content, kind_of_event, line_of_run
from edpsgd.ledger.events import Event, LedgerError, LedgerUnavailable, family, is_noise
from edpsgd.ledger.file import LedgerFile, read_records
from edpsgd.ledger.guarantee import Bound, Report
from edpsgd.ledger.records import RunRecord

BLOCK = 32


class Ledger:
    """Privacy events in the order in which they happened.

    Args:
        path: of the file to keep it in, which may hold the ledger of earlier runs; None keeps it in memory.

    Example:
        >>> ledger = Ledger()
        >>> ledger.open_epoch(0)
        >>> ledger.charge(0.8)
        >>> ledger.events[0].steps
        1
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._content = Content()
        self._open_index: int | None = None  # of the event that steps to come belong to
        self._reserved = 0  # steps of the open event that the file counts already
        self._is_closed = False
        # Whether the checkpoint that was loaded last knew of every step in here.
        self._equals_checkpoint = False
        self._composition: Composition | None = None
        self._file = None if path is None else LedgerFile(Path(path))
        if self._file is not None:
            self._continue_file(self._file)

    def _continue_file(self, file: LedgerFile) -> None:
        """Takes over what the file holds, and closes it when Python ends."""
        try:
            self._replay(file.records, file.path)
        except BaseException:
            file.close()
            raise
        atexit.register(_close_at_exit, weakref.ref(self))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """What a file holds, in memory; also of a run that is still writing."""
        ledger = cls()
        records, _ = read_records(Path(path))
        ledger._replay(records, Path(path))
        return ledger

    @property
    def runs(self) -> list[RunRecord]:
        """The records of every run that wrote here, oldest first: another one wherever its settings changed."""
        return self._content.runs

    @property
    def events(self) -> list[Event]:
        """What was released; the file also counts steps that are reserved and may not come."""
        return self._content.events

    # ---------------------------------------------------------------- runs

    def begin_run(self, settings: RunRecord | Mapping[str, Any], run_id: str | None = None) -> None:
        """Notes the settings of a run that is about to write here. Workers of one run share the id."""
        run = settings if isinstance(settings, RunRecord) else RunRecord.from_settings(settings)
        guarantee.unit_of([*self.runs, run])  # refuses another one than before
        guarantee.selection_of([*self.runs, run])
        self._open_index = None
        self._append_run(replace(run, id=run.id or run_id or uuid.uuid4().hex))

    def begin_branch(self, settings: RunRecord | Mapping[str, Any], name: str) -> None:
        """Notes the settings of a run that goes on from here beside this one, such as that of a copy.

        Its id follows from the last run's and the name, so that it is alike on all workers that give the same.
        """
        self.begin_run(settings, _derived_id(self.runs[-1].id, name))

    def note_change(self, settings: Mapping[str, Any]) -> None:
        """Notes that some settings of the last run have changed; its open event goes on."""
        last = self.runs[-1] if self.runs else RunRecord(id=uuid.uuid4().hex)
        changed = json.dumps(settings, sort_keys=True, default=repr)
        identity = {"id": _derived_id(last.id, changed), "changes": last.id}
        self._append_run(RunRecord.from_settings({**last.to_json(), **settings, **identity}))

    def _append_run(self, run: RunRecord) -> None:
        run = replace(run, begins_after=self._content.end)
        self._write(line_of_run(run), durable=True)  # conditions of ε depend on it
        self.runs.append(run)

    # ---------------------------------------------------------------- events

    @property
    def is_open(self) -> bool:
        """Whether an event is open for steps to come."""
        return self._open_index is not None

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more entries."""
        return self._is_closed

    @property
    def open_event(self) -> Event | None:
        """The event that steps to come belong to, if one is open."""
        return None if self._open_index is None else self.events[self._open_index]

    def open_epoch(self, epoch: int | None, batching: str = "unvouched", sampling_rate: float | None = None) -> None:
        """Opens an event for the steps to come, also for an epoch that was seen before.

        Args:
            epoch: its number, None if set_epoch was not called.
            batching: as in ``Event``.
            sampling_rate: as in ``Event``.

        Raises:
            LedgerError: if the steps before have other neighbours, and cannot be accounted together with these.
        """
        others = {event.batching for event in self.events if event.kind == "gradients" and event.steps}
        if any(family(other) != family(batching) for other in others):
            raise LedgerError(
                f"the ledger holds {' and '.join(sorted(others))} batches, and {batching} ones speak of other "
                "neighbours: they cannot be accounted together. Use a new ledger, with an ε of its own"
            )
        self.end_event()
        self._equals_checkpoint = False
        event = Event("gradients", epoch, batching=batching, sampling_rate=sampling_rate)
        self._open_index = self._append_event(event)

    def continue_epoch(self, epoch: int | None, batching: str, sampling_rate: float | None = None) -> None:
        """Goes on with the last event after a checkpoint was loaded, or opens a new one.

        For samplers whose position is in the checkpoint. It is a new one if the ledger knows of steps that the
        checkpoint does not: these are run again, on the same examples.
        """
        last = None
        for index, event in enumerate(self.events):
            if event.kind == "gradients":
                last = index
        kind = ("gradients", epoch, batching, sampling_rate)
        if last is None or not self._equals_checkpoint or kind_of_event(self.events[last]) != kind:
            self.open_epoch(epoch, batching, sampling_rate)
            return
        self.end_event()
        self._open_index = last
        self._reserved = self.events[last].steps
        self._equals_checkpoint = False

    def charge(self, noise_multiplier: float) -> None:
        """Pays for one step of the open event, before it is released.

        Args:
            noise_multiplier: std of the step's noise over its sensitivity. The smallest of an event counts for all.

        Raises:
            LedgerError: if no event is open, the ledger is closed or its file is gone.
            OSError: if the file cannot be written; the step is then counted, and must not be released.
        """
        if self._open_index is None:
            raise LedgerError("no event is open: call open_epoch() first")
        _check_noise(noise_multiplier)
        event = self.events[self._open_index]
        event.steps += 1
        is_lower = event.noise_multiplier is None or noise_multiplier < event.noise_multiplier
        if is_lower:
            event.noise_multiplier = noise_multiplier
        if is_lower or event.steps > self._reserved:
            self._reserve(self._open_index, event.steps - 1 + BLOCK)
        elif self._file is not None:
            self._file.check()

    def _reserve(self, index: int, steps: int) -> None:
        """Lets the file count so many steps of an event, most of which are still to come."""
        self._reserved = 0  # if the write fails, the next charge writes again
        self._write_event(index, steps, durable=True)
        self._reserved = steps

    def charge_layer_norms(self, noise_multiplier: float) -> None:
        """Pays for layer scales measured in a first step; multiplier 0 stands for raw norms, which no noise covers."""
        _check_noise(noise_multiplier)
        self._append_event(Event("layer_norms", None, noise_multiplier, steps=1), durable=True)

    def end_event(self) -> None:
        """Closes the open event, and replaces the steps reserved for it by those that happened; what follows is new."""
        index, reserved = self._open_index, self._reserved
        self._open_index, self._reserved = None, 0
        if index is not None and reserved > self.events[index].steps:
            self._write_event(index, self.events[index].steps)

    def _append_event(self, event: Event, durable: bool = False) -> int:
        """Writes a new event and returns its index."""
        index = len(self.events)
        self._write({"index": index, "event": asdict(event)}, durable)
        self.events.append(event)
        return index

    def _write_event(self, index: int, steps: int, durable: bool = False) -> None:
        event = {**asdict(self.events[index]), "steps": steps}
        self._write({"index": index, "event": event}, durable)

    # ---------------------------------------------------------------- what it amounts to

    def epsilon(self, delta: float, events: Sequence[Event] | None = None) -> Bound:
        """The tightest sound ε for what was recorded, with its conditions; or for other events of the same runs.

        Asked after every epoch, it does not compute what it has computed before.

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

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The whole ledger as JSON-ready data."""
        return self._content.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the ledger of a checkpoint, or keeps this one where it knows of more: what was released stays so.

        Raises:
            LedgerError: if neither continues the other, or this ledger's file lacks steps of the checkpoint.
        """
        other = Content.parse(state)
        self._check_rollback(other)
        guarantee.unit_of([*self.runs, *other.runs])
        guarantee.selection_of([*self.runs, *other.runs])
        has_less = self._content.is_unused or other.continues(self._content)
        if not (has_less or self._content.continues(other)):
            where = "" if self._file is None else f" {self._file.path}"
            raise LedgerError(
                f"the ledger{where} and the checkpoint's come from different runs, and neither continues the other. "
                "Load the checkpoint into a new optimizer, with the ledger file of its own run or a new one."
            )
        self.end_event()
        if has_less:
            self._replace_content(other.followed_by(self._content))
        self._equals_checkpoint = self.events == other.events

    def _check_rollback(self, other: Content) -> None:
        """An entry is in the file before its step is released: a file that knows less than a checkpoint has lost some.

        How many were behind those that the checkpoint knows, nobody can tell.
        """
        if self._file is None or other.is_unused:
            return
        if self._content.lacks_steps_of(other) or self._file.was_emptied:
            raise LedgerError(
                f"the ledger {self._file.path} holds less than the checkpoint's: it was cut, or taken from an older "
                "copy, and steps after the checkpoint may be missing too; or the checkpoint is of another branch. "
                "Restore it. A new file, at a path where "
                "there is none, begins with the checkpoint's ledger: its ε lacks what came after the checkpoint"
            )

    def _replace_content(self, content: Content) -> None:
        self._write({"state": content.to_json()}, durable=True)  # first: if it fails, nothing has changed
        self._content = content

    # ---------------------------------------------------------------- the file

    def close(self) -> None:
        """Writes the exact step count and closes the file, which then takes no more charges; done at exit too."""
        if not self._is_closed:
            try:
                self.end_event()
            finally:
                self._is_closed = True
                if self._file is not None:
                    self._file.close()

    def __del__(self) -> None:
        """A ledger that nobody holds any more gets no more charges: its exact step count can be written."""
        self._close_quietly()

    def _close_quietly(self) -> None:
        """Closes a file of this process; a failure is none, as then a few steps more are counted than happened."""
        file = getattr(self, "_file", None)
        if file is not None and file.is_own:
            with contextlib.suppress(OSError):
                self.close()

    def _write(self, record: dict[str, Any], durable: bool = False) -> None:
        if self._is_closed:
            raise LedgerUnavailable(
                f"{self._file.path if self._file else 'the ledger'} was closed: nothing more can be charged"
            )
        if self._file is not None:
            self._file.append(record, durable)

    def _replay(self, records: list[dict[str, Any]], path: Path) -> None:
        """Does once more what the lines of a file say."""
        for number, record in enumerate(records, 1):
            try:
                self._content.replay(record)
            except LedgerError as error:
                raise LedgerError(f"{path}, line {number}: {error}. Nothing was changed.") from None

    def __getstate__(self) -> dict[str, Any]:
        if self._file is not None:
            warnings.warn(
                f"a copy of the ledger {self._file.path} is in memory only: the file stays with the original",
                stacklevel=2,
            )
        return {**self.__dict__, "_file": None, "_is_closed": False, "_composition": None}


def _derived_id(before: str, what: str) -> str:
    """The id of a run that follows from another one: alike on all workers, and no other for anything else."""
    return hashlib.blake2b(f"{before}/{what}".encode(), digest_size=16).hexdigest()


def _check_noise(noise_multiplier: float) -> None:
    """Refuses NaN above all: it is below no other multiplier, and would hide behind the one before."""
    if not is_noise(noise_multiplier):
        raise LedgerError(f"a noise multiplier must be a finite number >= 0, got {noise_multiplier!r}")


def _close_at_exit(reference: weakref.ref[Ledger]) -> None:
    ledger = reference()
    if ledger is not None:
        ledger._close_quietly()
