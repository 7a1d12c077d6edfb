"""The privacy card: what a training run released, in plain words and as JSON, from its ledger alone.

Section numbers are those of privacy.md. A card holds settings and numbers, never text of the data.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from edpsgd import escaping, files
from edpsgd._version import VERSION
from edpsgd.card import markdown
from edpsgd.card.describe import facts
from edpsgd.ledger import conditions, guarantee
from edpsgd.ledger.conditions import History
from edpsgd.ledger.events import Event
from edpsgd.ledger.guarantee import Bound
from edpsgd.ledger.ledger import Ledger
from edpsgd.ledger.records import RunRecord

NAME = "privacy_card"
_LONGEST_NAME = 80
_LONGEST_STATEMENT = 200
_MEANING = {
    "add or remove one example": "Two data sets are neighbours if one has one example more than the other: it was "
    "added or removed.",
    "blank one example, its index stays": "Two data sets are neighbours if one example of the first is blank in the "
    "second, where it keeps its place and contributes nothing. To remove one, so that others move up, is not covered.",
    "replace or blank one example": "Two data sets are neighbours if they have the same size and differ in one "
    "example: it is replaced by any other, or blanked, so that it contributes nothing.",
    "add or remove one user": "Two data sets are neighbours if one has one user more than the other, with all that "
    "belongs to this user.",
    "replace one user": "Two data sets are neighbours if they have the same number of users and differ in one of them: "
    "all that belongs to this user is replaced by anything else.",
    "blank one example": "Two data sets are neighbours if they have the same size and one example of the first is "
    "blank in the second: it contributes nothing. To replace one is a larger change, with its own line in the table.",
}
_COMMON = ("kind", "noise_multiplier", "batching", "sampling_rate")  # to the events of one row of the schedule
_OWN = frozenset(statement.text for statement in conditions.NOT_COVERED)


@dataclass(frozen=True)
class Card:
    """A privacy card; all fields are JSON-ready. Make it with ``make`` or ``write``.

    Attributes:
        epsilon: the ε to publish; the string "inf" if it is infinite.
        delta: its δ.
        method: how it was computed.
        neighbours: what may differ between two data sets that cannot be told apart.
        unit: the unit of privacy and its neighbours, in plain words.
        conditions: what ε depends on that nobody has checked.
        bounds: ε by all methods, the one to publish first.
        facts: sampling, noise, clipping, layer scales, trust, and the choice among others, in plain words.
        schedule: the noise multipliers that were accounted, equal ones in a row taken together.
        epochs: how many different epochs there were.
        steps: steps of training, over all epochs.
        runs: how many runs wrote the ledger.
        settings: those of the last run.
        differences: settings that were not the same in all runs, with their values in the order of the runs.
        not_covered: what ε says nothing about, what the caller added first.
        metrics: what the caller added.
        versions: of the software that made the card.
    """

    epsilon: float | str
    delta: float
    method: str
    neighbours: str
    unit: str
    conditions: list[str]
    bounds: list[dict[str, Any]]
    facts: dict[str, str]
    schedule: list[dict[str, Any]]
    epochs: int
    steps: int
    runs: int
    settings: dict[str, Any]
    differences: dict[str, list[Any]]
    not_covered: list[str]
    metrics: dict[str, Any]
    versions: dict[str, str]

    def json(self) -> str:
        """The card as one JSON object."""
        return escaping.json_text(asdict(self), indent=2)

    def markdown(self) -> str:
        """The card as a page to read."""
        return markdown.page(self)


def make(
    ledger: Ledger, delta: float, metrics: Mapping[str, float] | None = None, not_covered: Sequence[str] = ()
) -> Card:
    """The card of a ledger.

    Args:
        ledger: of the run, with all runs that it continues.
        delta: the δ to find ε for.
        metrics: names and numbers to show, such as accuracies; the noise does not cover them.
        not_covered: what else the training job knows that ε says nothing about, such as "the word list: read from the
            training set". Never text of the data itself.

    Example:
        >>> ledger = Ledger()
        >>> ledger.open_epoch(0)
        >>> ledger.charge(1.0)
        >>> print(make(ledger, delta=1e-5).markdown().splitlines()[2])
        **ε = 4.378 at δ = 1e-05** (exact Gaussian; replace or blank one example)
    """
    numbers = _checked_metrics(metrics or {})
    statements = _checked_statements(not_covered)
    bounds = ledger.report(delta).bounds
    bound = bounds[0]
    runs = _without_completed(ledger.runs)
    run = runs[-1] if runs else RunRecord()
    released = [event for event in ledger.events if event.steps and event.noise_multiplier is not None]
    gradients = [event for event in released if event.kind == "gradients"]
    epochs = {event.epoch for event in gradients if event.epoch is not None}
    uncovered = conditions.not_covered(History(released, ledger.runs, bool(numbers)))
    fields = {
        "epsilon": bound.epsilon,
        "delta": float(delta),
        "method": bound.method,
        "neighbours": bound.neighbours,
        "unit": f"{_unit(run)} {_MEANING.get(bound.neighbours, bound.neighbours)}",
        "conditions": list(bound.conditions),
        "bounds": [_bound_entry(one) for one in bounds],
        "facts": facts(run, released, guarantee.selection_of(ledger.runs)),
        "schedule": _schedule(released),
        "epochs": len(epochs),
        "steps": sum(event.steps for event in gradients),
        "runs": len(runs),
        "settings": run.settings() if runs else {},
        "differences": _differences(runs),
        "not_covered": list(dict.fromkeys([*statements, *uncovered])),
        "metrics": numbers,
        "versions": _versions(),
    }
    return Card(**{name: escaping.json_ready(value) for name, value in fields.items()})


def write(
    folder: str | os.PathLike[str],
    ledger: Ledger,
    delta: float,
    metrics: Mapping[str, float] | None = None,
    not_covered: Sequence[str] = (),
) -> Card:
    """Writes privacy_card.md and privacy_card.json into a folder, and returns the card.

    The folder is made if need be, for its owner alone. Each file replaces the old one; arguments are those of ``make``.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> card = write(folder, Ledger(), delta=1e-5, metrics={"accuracy": 0.9})
        >>> sorted(os.listdir(folder))
        ['privacy_card.json', 'privacy_card.md']
    """
    card = make(ledger, delta, metrics, not_covered)
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write_text(Path(folder, f"{NAME}.md"), card.markdown())
    files.write_text(Path(folder, f"{NAME}.json"), card.json() + "\n")
    return card


def stated(data: Mapping[str, Any]) -> list[str]:
    """What the training job added to ``not_covered``, from the JSON of its card.

    Example:
        >>> import json
        >>> stated(json.loads(make(Ledger(), 1e-5, not_covered=["the word list: read from the training set"]).json()))
        ['the word list: read from the training set']
    """
    return [text for text in _checked_statements(data["not_covered"]) if text not in _OWN]


def _unit(run: RunRecord) -> str:
    if run.unit == "user":
        return "One user: all examples of one person, however many."
    return "One example, in language data one utterance."


def _without_completed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs without records that the next one only adds something to, as it then stands for both."""
    runs_with_next = itertools.pairwise([*runs, RunRecord()])
    return [run for run, following in runs_with_next if not _is_completed_by(following, run)]


def _is_completed_by(following: RunRecord, run: RunRecord) -> bool:
    """Whether the following record goes on from this one, and changes nothing that this one says."""
    if following.changes != run.id:
        return False
    later = following.settings()
    return all(later.get(name) == value for name, value in run.settings().items())


def _differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """The values of settings that are not the same in all runs, None where one was not recorded."""
    settings = [run.settings() for run in runs]
    differences = {}
    for name in dict.fromkeys(itertools.chain(*settings)):
        values = [one.get(name) for one in settings]
        if any(value != values[0] for value in values):
            differences[name] = values
    return differences


def _versions() -> dict[str, str]:
    installed = {name: metadata.version(name) for name in ("torch", "dp-accounting")}
    return {"edpsgd": VERSION, **installed, "python": platform.python_version()}


def _bound_entry(bound: Bound) -> dict[str, Any]:
    return {"epsilon": bound.epsilon, "method": bound.method, "neighbours": bound.neighbours}


def _schedule(released: Sequence[Event]) -> list[dict[str, Any]]:
    """Events in order, JSON-ready; those in a row that differ in their epochs only are one entry."""
    rows: list[dict[str, Any]] = []
    for event in released:
        common = {name: getattr(event, name) for name in _COMMON}
        if not (rows and _belongs_to_row(event, rows[-1])):
            rows.append({**common, "first_epoch": event.epoch, "last_epoch": event.epoch, "passes": 0, "steps": 0})
        row = rows[-1]
        row["last_epoch"] = event.epoch
        row["passes"] += event.steps if event.epoch is None else 1
        row["steps"] += event.steps
    return rows


def _belongs_to_row(event: Event, row: Mapping[str, Any]) -> bool:
    """Whether the event goes on with the epochs of a row; without epochs, every event has a row of its own."""
    if event.epoch is None or row["last_epoch"] is None:
        return False
    return all(getattr(event, name) == row[name] for name in _COMMON)


def _checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as a dictionary, if they are names and numbers: no text of the data may come into a card."""
    for name, value in metrics.items():
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_NAME):
            raise ValueError(f"metrics must have names of 1 to {_LONGEST_NAME} printable characters, got {name!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"metrics[{name!r}] must be an int or float, got {type(value).__name__}")
    return dict(metrics)


def _checked_statements(statements: Sequence[str]) -> list[str]:
    """The statements as a list, if they are short lines.

    Errors do not repeat a text, which may be private by mistake.
    """
    if isinstance(statements, str) or not isinstance(statements, Sequence):
        raise ValueError(f"not_covered must be a list of statements, got {type(statements).__name__}")
    for index, text in enumerate(statements):
        if not _is_statement(text):
            found = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise ValueError(
                f"not_covered[{index}] must be 1 to {_LONGEST_STATEMENT} printable characters without line breaks, "
                f"got {found}"
            )
    return list(statements)


def _is_statement(text: object) -> bool:
    if not isinstance(text, str):
        return False
    return text.isprintable() and bool(text.strip()) and len(text) <= _LONGEST_STATEMENT
