"""What a ledger holds in all, and whether one ledger is the later state of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from edpsgd.ledger.events import Event, LedgerError, is_int
from edpsgd.ledger.records import RunRecord

FORMAT = 1
# With a run whose ε covers a choice: versions that do not know of it refuse the ledger, and print no smaller ε.
FORMAT_OF_CHOSEN = 2


@dataclass
class Content:
    """Runs and events, both in the order in which they were written.

    Attributes:
        runs: the record of every run that wrote here, oldest first.
        events: what was released.
    """

    runs: list[RunRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @classmethod
    def parse(cls, state: object) -> Content:
        """The content of a state_dict, which may come from any file.

        Raises:
            LedgerError: saying what no ledger can have written.
        """
        if not isinstance(state, Mapping):
            raise LedgerError("a ledger's state must have names and values")
        if state.get("format") not in (FORMAT, FORMAT_OF_CHOSEN):
            known = f"{FORMAT} and {FORMAT_OF_CHOSEN}"
            raise LedgerError(f"the ledger's state has format {state.get('format')!r}, this version reads {known}")
        runs, events = state.get("runs"), state.get("events")
        if not isinstance(runs, list) or not isinstance(events, list):
            raise LedgerError("a ledger's state must have a list of runs and one of events")
        return cls([RunRecord.parse(run) for run in runs], [Event.parse(event) for event in events])

    def to_json(self) -> dict[str, Any]:
        """The content as JSON-ready data, which ``parse`` reads."""
        is_chosen = any(run.selection is not None for run in self.runs)
        return {
            "format": FORMAT_OF_CHOSEN if is_chosen else FORMAT,
            "runs": [run.to_json() for run in self.runs],
            "events": [asdict(event) for event in self.events],
        }

    def replay(self, record: Mapping[str, Any]) -> None:
        """Does once more what a line of a ledger's file says.

        A right checksum says that a line is whole, not that a run can have written it.

        Raises:
            LedgerError: if no run can have written it.
        """
        if record.keys() == {"state"}:
            whole = Content.parse(record["state"])
            self.runs, self.events = whole.runs, whole.events
        elif record.keys() in ({"run"}, {"chosen_run"}):
            [run] = record.values()
            self.runs.append(RunRecord.parse(run))
        elif record.keys() == {"index", "event"}:
            index, event = record["index"], Event.parse(record["event"])
            if not is_int(index) or not 0 <= index <= len(self.events):
                raise LedgerError("an event has a place that it cannot have")
            self.events[index : index + 1] = [event]
        else:
            raise LedgerError("not an entry that this version can read")

    @property
    def is_unused(self) -> bool:
        """Whether it holds no step."""
        return not any(event.steps for event in self.events)

    @property
    def end(self) -> tuple[int, int]:
        """How many events there are, and steps in all of them: where a run that begins now branches off.

        The open event need not be the last: measured scales are written behind it.
        """
        return len(self.events), sum(event.steps for event in self.events)

    def continues(self, earlier: Content) -> bool:
        """Whether this is the other content, perhaps some steps, events and runs later."""
        ids = [run.id for run in earlier.runs]
        own_ids = [run.id for run in self.runs]
        if own_ids[: len(ids)] != ids or len(self.events) < len(earlier.events):
            return False
        later_runs = self.runs[len(ids) :]
        if later_runs and _branched_off_before(later_runs[0], earlier.end):
            return False  # the other one has taken steps of its own since
        common = zip(self.events, earlier.events, strict=False)
        return all(_is_at_least(mine, theirs) for mine, theirs in common)

    def lacks_steps_of(self, other: Content) -> bool:
        """Whether both are of one run, and the other one has events or steps that are missing here."""
        known_ids = {run.id for run in other.runs}
        if not any(run.id in known_ids for run in self.runs):
            return False
        if len(self.events) < len(other.events):
            return True
        common = zip(self.events, other.events, strict=False)
        return not all(_is_at_least(mine, theirs) for mine, theirs in common)

    def followed_by(self, other: Content) -> Content:
        """This content, and behind it the runs that only the other one has; they begin where this one ends."""
        known_ids = {run.id for run in self.runs}
        own = [replace(run, begins_after=self.end) for run in other.runs if run.id not in known_ids]
        return Content(self.runs + own, self.events)


def line_of_run(run: RunRecord) -> dict[str, Any]:
    """The line of a ledger's file that ``replay`` reads; of a chosen run, one that other versions refuse."""
    return {"run" if run.selection is None else "chosen_run": run.to_json()}


def kind_of_event(event: Event) -> tuple[str, int | None, str, float | None]:
    """What steps of one event have in common, beside the noise: kind, epoch, batching and sampling rate."""
    return event.kind, event.epoch, event.batching, event.sampling_rate


def _branched_off_before(run: RunRecord, end: tuple[int, int]) -> bool:
    """Whether the run began when there were fewer events or steps than at this end; runs of old ledgers do not say."""
    if run.begins_after is None:
        return False
    events, steps = end
    events_then, steps_then = run.begins_after
    return events > events_then or steps > steps_then


def _is_at_least(event: Event, earlier: Event) -> bool:
    """Whether the event can be the earlier one some steps later: it costs no less."""
    if kind_of_event(event) != kind_of_event(earlier):
        return False
    if earlier.noise_multiplier is None:
        return True
    return event.steps >= earlier.steps and (event.noise_multiplier or 0.0) <= earlier.noise_multiplier
