"""Typed data from any file: what is of another type, None or too deep is refused, and unknown names are kept."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from edpsgd import LedgerError
from edpsgd.ledger.records import RunRecord
from edpsgd.ledger.typed_record import DEEPEST, has_type, is_nested_too_deep


def test_names_of_other_versions_are_kept_and_cannot_be_changed() -> None:
    batches = {"kind": "poisson", "new": 1}
    data = {"id": "a", "secret_sum": {"with": [1, {"x": None}]}, "others": 3, "batches": batches}
    run = RunRecord.parse(data)
    data["secret_sum"]["with"].append(2)
    assert run.others == {"secret_sum": {"with": [1, {"x": None}]}, "others": 3}
    assert run.batches.others == {"new": 1}
    changed = replace(run, workers=3)
    assert changed.to_json()["secret_sum"] == {"with": [1, {"x": None}]}
    assert changed.to_json()["batches"]["new"] == 1
    changed.to_json()["secret_sum"]["with"].clear()
    assert changed.others == run.others
    with pytest.raises(TypeError):
        run.others["secret_sum"] = None
    with pytest.raises(FrozenInstanceError):
        run.workers = 1
    with pytest.raises(LedgerError, match="a name twice"):
        RunRecord(id="a", others={"workers": 3})


@pytest.mark.parametrize("place", ["others", "batches"])
def test_what_is_nested_too_deep_is_refused(place) -> None:
    nested: object = 0
    for turn in range(100_000):
        nested = [nested] if turn % 2 else {"x": nested}
    data = {"id": "a", "batches": {"x": nested}} if place == "batches" else {"id": "a", "x": nested}
    with pytest.raises(LedgerError, match="nested too deep"):
        RunRecord.parse(data)


@pytest.mark.parametrize(
    ("value", "allowed", "is_right"),
    [
        (1, (int,), True),
        (1, (float,), True),
        (1.0, (int,), False),
        (True, (int, float), False),
        (True, (bool,), True),
        (None, (float, type(None)), True),
        ("1", (float, type(None)), False),
    ],
)
def test_types_of_values(value, allowed, is_right) -> None:
    assert has_type(value, allowed) == is_right


@pytest.mark.parametrize(("times", "is_too_deep"), [(0, False), (DEEPEST, False), (DEEPEST + 1, True)])
def test_how_deep_is_too_deep(times, is_too_deep) -> None:
    nested: object = 0
    for turn in range(times):
        nested = [nested, 1] if turn % 2 else {"x": nested, "y": None}
    assert is_nested_too_deep(nested) == is_too_deep
