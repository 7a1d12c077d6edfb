"""What is kept of one optimizer's releases: where its sampler stands, what its budget allows, and its ledger."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

from edpsgd._arguments import UNITS
from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.ledger.budget import Allowance, Budget
from edpsgd.ledger.events import Event, LedgerError
from edpsgd.ledger.ledger import Ledger
from edpsgd.ledger.records import MARKS, RunRecord
from edpsgd.ledger.selection import Selection
from edpsgd.mechanism.settings import Settings
from edpsgd.sampling.base import Batches

# What any worker may do, and what is then a condition of ε for all: a bit each, in the byte of flags
# of a step's message.
_FLAGS = {name: 1 << place for place, name in enumerate(MARKS)}


class Bookkeeping:
    """Ledger, sampler and budget of one optimizer; alike on all workers, but for the file that worker 0 keeps.

    Args:
        collective: the workers.
        path: of the ledger's file, if there is one.
        batches: the sampler that the training draws from, if there is one.
        budget: what may be spent, if there is a limit.
    """

    def __init__(
        self,
        collective: Collective,
        path: str | os.PathLike[str] | None,
        batches: Batches | None,
        budget: Budget | None,
    ) -> None:
        self.ledger, self.batches, self.budget = Ledger(), batches, budget
        self._moves = 0 if batches is None else batches.moves  # as far as the optimizer knows
        self._resumed = False  # whether the next epoch may be the rest of the one of a checkpoint
        self._failure: Exception | None = None  # why the next step must not be taken
        self._collective, self._path = collective, path
        self._place = (collective.rank, collective.size)
        self._allowance: Allowance | None = None

    def begin_run(self, run: RunRecord) -> None:
        """Opens the ledger, on all workers at once, and begins a run in it.

        Worker 0 keeps the file; the others know what it holds.
        """

        def begin() -> dict[str, Any]:
            if self._collective.rank == 0 and self._path is not None:
                self.ledger = Ledger(self._path)
            self.ledger.begin_run(run)
            return self.ledger.state_dict()

        answers = consensus.together(self._collective, begin)
        if self._collective.rank > 0:
            self.ledger = Ledger()
            self.ledger.load_state_dict(answers[0])
        self._renew_allowance()

    def _renew_allowance(self) -> None:
        """Works out anew what the budget allows, as the ledger is another one or has grown otherwise."""
        self._allowance = Allowance(self.budget, self.ledger) if self.budget else None

    def open_epoch(self, epoch: int) -> None:
        """A new pass: a new event, or the rest of the one in which a checkpoint was written."""
        is_same_epoch = self.batches is not None and self.batches.epoch == epoch
        is_rest = self._resumed and is_same_epoch and self._is_inside_epoch()
        self._resumed, self._failure = False, None
        if is_rest and self.ledger.is_open:
            return
        if self.batches is not None:
            self.batches.set_epoch(epoch)
            self._moves = self.batches.moves
        self._write(lambda: self.ledger.open_epoch(epoch, *self._batching()))

    def _write(self, entry: Callable[[], None]) -> None:
        """Writes into the ledger; if only worker 0 knows that it failed, the next step tells all of them."""
        try:
            entry()
        except OSError as error:
            if self._place[1] == 1:
                raise
            self._failure = error

    def _is_inside_epoch(self) -> bool:
        """Whether some steps of the sampler's epoch were taken, and some are left."""
        return self.batches is not None and 0 < self.batches.position < self.batches.steps_per_epoch

    def _batching(self) -> tuple[str, float | None]:
        """How examples are drawn, in the ledger's word for it, and at which rate."""
        return ("unvouched", None) if self.batches is None else (self.batches.kind, self.batches.sampling_rate)

    # ---------------------------------------------------------------- conditions of ε

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
    def flags(self) -> int:
        """What of that this worker knows, as bits, for the step's message."""
        return sum(bit for name, bit in _FLAGS.items() if self._is_noted(name))

    def note_flags(self, flags: list[int]) -> None:
        """Writes down what other workers do and this one, perhaps without data yet, does not.

        It is on disk before the model moves.

        Args:
            flags: of each worker, by rank.
        """
        all_flags = reduce(or_, flags)
        new = [name for name, bit in _FLAGS.items() if all_flags & bit and not self._is_noted(name)]

        def write() -> None:
            for name in new:
                self.ledger.note_change({name: True})

        if flags[0] == all_flags:  # worker 0, who keeps the file, knows it all
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

    # ---------------------------------------------------------------- may the step be taken, and what does it cost

    def pay_step(self, noise_multiplier: float, closed: int, epoch: int | None) -> Exception | None:
        """Pays for a step, or says why it must not be taken.

        Args:
            noise_multiplier: of the Gaussian mechanism that the step really is.
            closed: how many units this worker has in it.
            epoch: what set_epoch said last, None before.

        Returns:
            Why not, if not. That the entry could not be written only worker 0 knows.
        """
        refusal = self._failure or self._refusal_of_sampler(closed)
        if refusal is None and self._allowance is not None:
            event = self._next_event(epoch)
            refusal = self._allowance.refusal(noise_multiplier, event, self._remaining())
        if refusal is not None:
            return refusal

        def entry() -> None:
            if not self.ledger.is_open:
                self.ledger.open_epoch(self._numbered(epoch), *self._batching())
            self.ledger.charge(noise_multiplier)

        return _failure_of(entry)

    def pay_layer_norms(self, noise_multiplier: float, closed: int) -> Exception | None:
        """The same for a step that measures scales."""
        refusal = self._failure or self._refusal_of_sampler(closed)
        if refusal is None and self._allowance is not None:
            refusal = self._allowance.refusal_of_layer_norms(noise_multiplier)
        if refusal is not None:
            return refusal
        return _failure_of(lambda: self.ledger.charge_layer_norms(noise_multiplier))

    def _refusal_of_sampler(self, closed: int) -> RuntimeError | None:
        """Why the step is not one that the sampler produced: what it says of its batches does not hold for others."""
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
        """The open event, or one like that which the step would open."""
        return self.ledger.open_event or Event("gradients", self._numbered(epoch), None, 0, *self._batching())

    def _numbered(self, epoch: int | None) -> int | None:
        """A sampler knows which pass it is in, even if nobody has said."""
        return self.batches.epoch if epoch is None and self.batches is not None else epoch

    def _remaining(self) -> int | None:
        """How many steps are left of the sampler's epoch; None if nobody knows."""
        return None if self.batches is None else self.batches.steps_per_epoch - self.batches.position

    def record_step(self) -> None:
        """Notes that all workers have taken the step, so that the sampler goes on."""
        if self.batches is not None:
            self.batches.take()

    def record_failed_step(self, epoch: int | None) -> None:
        """Notes that a step has left this worker and was not taken.

        If its examples come again, that is another pass. A draw at random must not come again, after a checkpoint
        neither: each is accounted as an independent one.
        """
        self._resumed = False
        self._renew_allowance()
        with contextlib.suppress(OSError, LedgerError):  # no event is open then, and the next charge tries again
            self.ledger.open_epoch(self._numbered(epoch), *self._batching())
        if self.batches is not None and self.batches.sampling_rate is not None:
            self.batches.take()
            self._failure = RuntimeError(
                "a step left this worker and was not taken, so that its draw must not be used again: call "
                "optimizer.set_epoch() for a new pass"
            )

    # ---------------------------------------------------------------- where the sampler stands

    @property
    def draws(self) -> str | None:
        """What tells whether all workers draw the same, where they must."""
        return None if self.batches is None else self.batches.common_draws

    @property
    def moves(self) -> int:
        """How often the sampler was moved to another epoch or position."""
        return 0 if self.batches is None else self.batches.moves

    @moves.setter
    def moves(self, moves: int) -> None:
        if self.batches is not None:
            self.batches.moves = moves

    @property
    def position(self) -> int | None:
        """How many steps of its epoch the sampler knows to be taken."""
        return None if self.batches is None else self.batches.position

    # ---------------------------------------------------------------- checkpoints and copies

    def state_dict(self) -> dict[str, Any]:
        """Ledger and sampler, JSON-ready."""
        state: dict[str, Any] = {"ledger": self.ledger.state_dict()}
        if self.batches is not None:
            state["batches"] = self.batches.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a checkpoint was written; one that does not fit changes nothing."""
        batches = self.batches if "batches" in state else None
        check_place(self.batches, self._collective)
        if batches is not None:
            batches.check_state(state["batches"])
        ledger = self._moved_ledger()
        ledger.load_state_dict(state["ledger"])
        self.ledger = ledger
        self._settle()
        self._renew_allowance()
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
        if self.batches is not None and self._is_inside_epoch():
            self.ledger.continue_epoch(self.batches.epoch, *self._batching())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._place = (self._collective.rank, self._collective.size)
        self._renew_allowance()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_allowance": None, "_path": None}  # the file stays with the original


def _failure_of(entry: Callable[[], None]) -> Exception | None:
    """The error of an entry that could not be written, None if it was."""
    try:
        entry()
    except (OSError, LedgerError) as error:
        return error
    return None


def run_record(
    settings: Settings, batches: Batches | None, workers: int, selection: Selection | None = None
) -> RunRecord:
    """What the ledger says of a run with these settings, which has no id yet."""
    described = None if batches is None else batches.describe()
    run = RunRecord.from_settings({"workers": workers, **settings.describe(), "batches": described})
    return replace(run, selection=selection)


def check_arguments(
    batches: object, budget: object, selection: object, unit: str, ledger: object, collective: Collective
) -> None:
    """Refuses what is of the wrong kind, and a sampler that does not fit the unit or the worker.

    An unknown unit is not refused here, but with the other settings.
    """
    if ledger is not None and not isinstance(ledger, str | os.PathLike):
        raise ValueError(f"ledger must be None or a path, got {ledger!r}")
    if budget is not None and not isinstance(budget, Budget):
        raise ValueError(f"budget must be None or edpsgd.Budget(epsilon, delta), got {budget!r}")
    if selection is not None and not isinstance(selection, Selection):
        raise ValueError(f"selection must be None or edpsgd.Selection(mean=...), got {selection!r}")
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
