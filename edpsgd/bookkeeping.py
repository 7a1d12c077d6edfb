"""The books of a run: which steps the sampler made, what the budget allows, and what the ledger records."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import torch

from edpsgd import bookkeeping
from edpsgd._arguments import UNITS
from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.ledger.budget import Allowance, Budget
from edpsgd.ledger.events import Event, LedgerError
from edpsgd.ledger.ledger import Ledger
from edpsgd.ledger.records import MARKS, RunRecord
from edpsgd.sampling.base import Batches

# Of the record's marks, in the byte that rides in the step's message.
_BITS = {mark: 1 << place for place, mark in enumerate(MARKS)}


class Books:
    """Ledger, sampler and budget of one optimizer; the same on every worker, but for the file that worker 0 keeps."""

    def __init__(
        self,
        collective: Collective,
        path: str | os.PathLike[str] | None,
        run: RunRecord,
        batches: Batches | None,
        budget: Budget | None,
    ) -> None:
        self.ledger, self.batches, self.budget = Ledger(), batches, budget
        self._moves = 0 if batches is None else batches.moves
        self._resumed = False
        self._failure: Exception | None = None
        self._collective, self._path = collective, path
        self._place = (collective.rank, collective.size)
        self._open(collective, path, run)
        self._allowance = Allowance(budget, self.ledger) if budget else None

    def _open(self, collective: Collective, path: str | os.PathLike[str] | None, run: RunRecord) -> None:
        """Worker 0 keeps the file; the others know what it holds."""

        def begin() -> dict[str, Any]:
            if collective.rank == 0 and path is not None:
                self.ledger = Ledger(path)
            self.ledger.begin_run(run)
            return self.ledger.state_dict()

        answers = consensus.together(collective, begin)
        if collective.rank > 0:
            self.ledger = Ledger()
            self.ledger.load_state_dict(answers[0])

    def open_epoch(self, epoch: int) -> None:
        """A new pass: a new event, or the rest of the one in which a checkpoint was written."""
        is_rest = self._resumed and self.batches is not None and self.batches.epoch == epoch and self._is_inside()
        self._resumed, self._failure = False, None
        if is_rest and self.ledger.is_open:
            return
        if self.batches is not None:
            self.batches.set_epoch(epoch)
            self._moves = self.batches.moves
        self._write(lambda: self.ledger.open_epoch(epoch, *self._batching()))

    def _write(self, entry: Callable[[], None]) -> None:
        """Into the ledger; if only worker 0 knows that it failed, the next step tells all of them."""
        try:
            entry()
        except OSError as error:
            if self._place[1] == 1:
                raise
            self._failure = error

    def _is_inside(self) -> bool:
        return self.batches is not None and 0 < self.batches.position < self.batches.steps_per_epoch

    def _batching(self) -> tuple[str, float | None]:
        return ("unvouched", None) if self.batches is None else (self.batches.kind, self.batches.sampling_rate)

    def empty_units(self, closed: int) -> int:
        """How many empty micro-batches a step without a gradient closes: the last, or all if they came together."""
        made = 1 if self.batches is None else self.batches.micro_batches or 1
        if self.batches is not None and self.batches.is_whole(0):
            return max(0, made - closed)
        return int(closed < made)

    def note(self, settings: dict[str, Any]) -> None:
        """Writes down settings that have changed."""
        self._write(lambda: self.ledger.note_change(settings))

    def note_once(self, what: str) -> None:
        """Writes down that the run does something on which a condition of ε depends."""
        if not self._is_noted(what):
            self.note({what: True})

    def _is_noted(self, what: str) -> bool:
        return bool(getattr(self.ledger.runs[-1], what))

    @property
    def marks(self) -> int:
        """What of that this worker knows, for the step's message."""
        return sum(bit for mark, bit in _BITS.items() if self._is_noted(mark))

    def note_of_others(self, marks: list[int]) -> None:
        """What other workers do and this one, perhaps without data yet, does not; on disk before the model moves."""
        all_marks = reduce(or_, marks)
        new = [mark for mark, bit in _BITS.items() if all_marks & bit and not self._is_noted(mark)]

        def write() -> None:
            for mark in new:
                self.ledger.note_change({mark: True})

        if marks[0] == all_marks:  # worker 0, who keeps the file, knows it all
            write()
        else:
            consensus.together(self._collective, write)

    # ---------------------------------------------------------------- workers that have changed

    def displaced(self) -> RuntimeError | None:
        """Why no step may be taken if this is another worker now, or one of more or fewer, than at construction.

        Noise, shards and the ledger's file follow from the worker's number.
        """
        now = (self._collective.rank, self._collective.size)
        if now == self._place:
            return None
        rank, size = self._place
        return RuntimeError(
            f"this was worker {rank} of {size} when its optimizer was made, and is worker {now[0]} of {now[1]} now: "
            "load a checkpoint on all workers, or make sampler and optimizer anew"
        )

    def _moved_ledger(self) -> Ledger:
        """The ledger for where this worker is now: worker 0 keeps the file, which knows of every release."""
        was_first, is_first = self._place[0] == 0, self._collective.rank == 0
        if self._path is None or was_first == is_first:
            return self.ledger
        if is_first:
            return Ledger(self._path)
        self.ledger.close()
        ledger = Ledger()
        ledger.load_state_dict(self.ledger.state_dict())
        return ledger

    def grouping(
        self, losses: torch.Tensor, units: torch.Tensor | None, count: int | None, unit: str
    ) -> tuple[torch.Tensor | None, int | None]:
        """The number of each example's unit, None if each is its own, and how many units there are."""
        if unit == "user":
            raise ValueError("backward(losses) is for examples and micro-batches: use edpsgd.Federated for users")
        if unit == "example":
            if units is not None:
                raise ValueError("units are for unit='micro_batch': with unit='example' every loss is one of its own")
            return self._single(len(losses))
        if units is not None:
            if self.batches is not None:
                raise ValueError("units are for training without a sampler: this one knows its micro-batches")
            return units, count
        sizes = [len(losses)] if self.batches is None else self.batches.sizes(len(losses))
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)), len(sizes)

    def _single(self, examples: int) -> tuple[torch.Tensor | None, int]:
        """Every example is its own; in the last step of an epoch the sampler may have made fewer than in the others."""
        batches = self.batches
        made = batches.micro_batches or 0 if batches is not None and batches.is_whole(examples) else 0
        return (torch.arange(examples), made) if made > examples else (None, examples)

    def refusal(self, noise_multiplier: float, closed: int, epoch: int | None) -> Exception | None:
        """Why the step must not be taken, if it must not."""
        outside = self._failure or self._outside(closed)
        if outside is not None or self._allowance is None:
            return outside
        return self._allowance.refusal(noise_multiplier, self._next_event(epoch), self._remaining())

    def refusal_of_layer_norms(self, noise_multiplier: float, closed: int) -> Exception | None:
        """The same for a step that measures scales."""
        outside = self._failure or self._outside(closed)
        if outside is not None or self._allowance is None:
            return outside
        return self._allowance.refusal_of_layer_norms(noise_multiplier)

    def _outside(self, closed: int) -> RuntimeError | None:
        """Steps outside of what the sampler produced break what it vouches for."""
        if self.batches is None:
            return None
        if self._moves != self.batches.moves:
            return RuntimeError(
                "set_epoch() or load_state_dict() of the sampler was called: call optimizer.set_epoch() and "
                "optimizer.load_state_dict() instead, which do both"
            )
        reason = self.batches.refusal(closed)
        return None if reason is None else RuntimeError(f"step refused: {reason}")

    def _next_event(self, epoch: int | None) -> Event:
        return self.ledger.open_event or Event("gradients", self._numbered(epoch), None, 0, *self._batching())

    def _numbered(self, epoch: int | None) -> int | None:
        """A sampler knows which pass it is in, even if nobody has said."""
        return self.batches.epoch if epoch is None and self.batches is not None else epoch

    def _remaining(self) -> int | None:
        return None if self.batches is None else self.batches.steps_per_epoch - self.batches.position

    def charge(self, noise_multiplier: float, epoch: int | None) -> Exception | None:
        """Pays for a step; an error if the entry could not be written, which only worker 0 knows."""

        def entry() -> None:
            if not self.ledger.is_open:
                self.ledger.open_epoch(self._numbered(epoch), *self._batching())
            self.ledger.charge(noise_multiplier)

        return _failure_of(entry)

    def charge_layer_norms(self, noise_multiplier: float) -> Exception | None:
        """The same for measured scales."""
        return _failure_of(lambda: self.ledger.charge_layer_norms(noise_multiplier))

    def take(self) -> None:
        """Notes that all workers have taken the step."""
        if self.batches is not None:
            self.batches.take()

    def lose(self, epoch: int | None) -> None:
        """A step has left this worker and was not taken.

        If its examples come again, that is another pass. A draw at random must not come again, after a checkpoint
        neither: each is accounted as an independent one.
        """
        self._resumed = False
        self._allowance = Allowance(self.budget, self.ledger) if self.budget else None
        with contextlib.suppress(OSError, LedgerError):  # no event is open then, and the next charge tries again
            self.ledger.open_epoch(self._numbered(epoch), *self._batching())
        if self.batches is not None and self.batches.sampling_rate is not None:
            self.batches.take()
            self._failure = RuntimeError(
                "a step left this worker and was not taken, so that its draw must not be used again: call "
                "optimizer.set_epoch() for a new pass"
            )

    @property
    def draws(self) -> str | None:
        """What tells whether all workers draw the same, where they must."""
        return None if self.batches is None else self.batches.common_draws

    @property
    def moves(self) -> int:
        """How often the sampler was moved."""
        return 0 if self.batches is None else self.batches.moves

    @moves.setter
    def moves(self, moves: int) -> None:
        if self.batches is not None:
            self.batches.moves = moves

    @property
    def position(self) -> int | None:
        """Of the sampler, in its epoch."""
        return None if self.batches is None else self.batches.position

    def state_dict(self) -> dict[str, Any]:
        """Ledger and sampler, JSON-ready."""
        batches = {} if self.batches is None else {"batches": self.batches.state_dict()}
        return {"ledger": self.ledger.state_dict(), **batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a checkpoint was written; one that does not fit changes nothing."""
        batches = self.batches if "batches" in state else None
        bookkeeping.check_place(self.batches, self._collective)
        if batches is not None:
            batches.check_state(state["batches"])
        ledger = self._moved_ledger()
        ledger.load_state_dict(state["ledger"])
        self.ledger = ledger
        self._settle()
        self._allowance = Allowance(self.budget, self.ledger) if self.budget else None
        if batches is not None:
            batches.load_state_dict(state["batches"])
            self._moves = batches.moves

    def _settle(self) -> None:
        """From here on the worker is the one that it is now."""
        now = (self._collective.rank, self._collective.size)
        if now[1] != self._place[1]:
            self.ledger.note_change({"workers": now[1]})
        self._place = now

    def resume(self) -> None:
        """After a checkpoint was loaded: goes on with the event in the middle of which it was written."""
        self._resumed, self._failure = True, None
        if self.batches is not None and self._is_inside():
            self.ledger.continue_epoch(self.batches.epoch, *self._batching())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._place = (self._collective.rank, self._collective.size)
        self._allowance = Allowance(self.budget, self.ledger) if self.budget else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_allowance": None, "_path": None}  # the file stays with the original


def _failure_of(entry: Callable[[], None]) -> Exception | None:
    try:
        entry()
    except (OSError, LedgerError) as error:
        return error
    return None


def check_books(batches: object, budget: object, unit: str, ledger: object, collective: Collective) -> None:
    """Refuses a sampler, budget or ledger of the wrong kind, and a sampler that does not fit the unit or the worker."""
    if ledger is not None and not isinstance(ledger, str | os.PathLike):
        raise ValueError(f"ledger must be None or a path, got {ledger!r}")
    if budget is not None and not isinstance(budget, Budget):
        raise ValueError(f"budget must be None or edpsgd.Budget(epsilon, delta), got {budget!r}")
    if batches is None and unit == "user":
        raise ValueError("unit='user' needs batches: PoissonUsers or FixedSizeUsers")
    if batches is None:
        return
    if not isinstance(batches, Batches):
        raise ValueError(f"batches must be None, ShuffledBatches or PoissonBatches, got {type(batches).__name__}")
    check_place(batches, collective)
    if unit in UNITS and not batches.fits(unit):
        raise ValueError(
            f"unit={unit!r} does not fit the sampler: with unit='example' use PoissonBatches(unit='example') or "
            "ShuffledBatches(batch_size=1), with unit='micro_batch' PoissonBatches(unit='micro_batch'), with "
            "unit='user' PoissonUsers or FixedSizeUsers"
        )


def check_place(batches: Batches | None, collective: Collective) -> None:
    """Refuses a sampler of another worker: two workers would use the same examples."""
    if batches is not None and not batches.belongs_to(collective):
        raise ValueError(
            f"the sampler was made for another worker than {collective.rank} of {collective.size}, this one: make it "
            "on each worker, after hvd.init() or init_process_group(), with the same collective as the optimizer"
        )
