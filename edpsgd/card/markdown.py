"""The privacy card as a page to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edpsgd import escaping
from edpsgd.card.describe import short
from edpsgd.ledger.guarantee import format_epsilon

if TYPE_CHECKING:
    from edpsgd.card.card import Card

_LONGEST_TABLE = 14


def page(card: Card) -> str:
    """The card as Markdown."""
    parts = [
        "# Privacy card",
        f"**ε = {_digits(card.epsilon)} at δ = {card.delta:g}** ({card.method}; {card.neighbours})",
        _section("It holds on condition that", bullets([escaping.markdown(text) for text in card.conditions])),
        _section("Unit of privacy", card.unit),
        _section("ε by every method", _bounds_table(card.bounds)),
        _section("Training", _training(card)),
        *(_section(name, escaping.markdown(text)) for name, text in card.facts.items()),
        _section("Noise multipliers that were accounted", _schedule_table(card.schedule)),
        _section("Runs", _runs(card)),
        _section("Not covered by ε", bullets([escaping.markdown(text) for text in card.not_covered])),
        _section("Metrics", table(("Metric", "Value"), _metric_rows(card.metrics))),
        _section("Versions", ", ".join(f"{name} {version}" for name, version in card.versions.items())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of cells that are Markdown already; the empty text without rows.

    Example:
        >>> print(table(("ε", "Method"), [("8", "PLD")]))
        | ε | Method |
        | --- | --- |
        | 8 | PLD |
    """
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(items: Sequence[str]) -> str:
    """A Markdown list of items that are Markdown already; the empty text without items."""
    return "\n".join(f"- {item}" for item in items)


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _training(card: Card) -> str:
    epochs = f"{card.epochs} epochs, " if card.epochs else ""
    return f"{epochs}{card.steps} steps. After a crash, steps that were reserved in the ledger count as taken."


def _runs(card: Card) -> str:
    if card.runs < 2:
        return ""
    text = f"{card.runs} runs wrote the ledger, and ε is that of all of them. The settings above are the last run's."
    changes = [f"{_code(name)}: {_changes(name, values)}" for name, values in card.differences.items()]
    return f"{text} These differ between the runs:\n\n{bullets(changes)}" if changes else text


def _bounds_table(bounds: Sequence[Mapping[str, Any]]) -> str:
    rows = [(_digits(bound["epsilon"]), bound["method"], bound["neighbours"]) for bound in bounds]
    return table(("ε", "Method", "Neighbours"), rows)


def _schedule_table(schedule: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for row in schedule:
        rows.append((_epochs(row), str(row["passes"]), str(row["steps"]), short(row["noise_multiplier"])))
    if len(rows) > _LONGEST_TABLE:
        half = _LONGEST_TABLE // 2
        rows = [*rows[:half], ("…", "…", "…", "…"), *rows[-half:]]
    return table(("Epochs", "Passes", "Steps", "Noise multiplier"), rows)


def _epochs(row: Mapping[str, Any]) -> str:
    if row["kind"] == "layer_norms":
        return "layer scales"
    first, last = row["first_epoch"], row["last_epoch"]
    if first is None:
        return "not given"
    return str(first) if first == last else f"{first} to {last}"


def _changes(name: str, values: Sequence[Any]) -> str:
    """The values of a setting in the order of the runs; equal ones in a row are written once."""
    texts: list[str] = []
    for value in values:
        text = _setting(name, value)
        if not texts or text != texts[-1]:
            texts.append(text)
    return escaping.markdown(", then ".join(texts))


def _setting(name: str, value: Any) -> str:
    is_given = name == "layer_scaling" and isinstance(value, Mapping) and "measured" not in value
    if name == "selection" and isinstance(value, Mapping):
        return f"the best of {value.get('mean')} on average"
    return f"{len(value)} given scales" if is_given else json.dumps(value)


def _digits(epsilon: float | str) -> str:
    return format_epsilon(float(epsilon))


def _metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(escaping.markdown(name), escaping.markdown(short(value))) for name, value in metrics.items()]


def _code(name: str) -> str:
    """Names of settings are words; anything else, from a strange ledger, is shown as text."""
    return f"`{name}`" if name.isidentifier() else escaping.markdown(name)
