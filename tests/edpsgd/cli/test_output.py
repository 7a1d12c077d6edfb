"""Numbers and tables as the command prints them."""

from __future__ import annotations

import math

import pytest

from edpsgd.cli import output
from edpsgd.ledger.guarantee import Bound, Report


@pytest.mark.parametrize("z", [1e-6, 0.123456789, 1.0, 2.6843061, 999999.94, 12345678.9])
def test_printed_noise_is_not_below_the_needed_one(z) -> None:
    printed = float(output.rounded_up(z))
    assert z * (1 - 1e-12) <= printed <= z * (1 + 1.1e-6)


def test_tables_are_aligned() -> None:
    assert output.table_lines([["ab", "1"], ["c", "22"]], cell_width=3) == ["  ab    1", "  c    22"]


def test_json_has_no_infinities() -> None:
    assert (
        output.json_page({"epsilon": math.inf, "noise": [1.0]})
        == '{\n  "epsilon": "inf",\n  "noise": [\n    1.0\n  ]\n}'
    )


def test_bounds_name_other_neighbours_only() -> None:
    first, other = Bound(1.0, 1e-5, "PLD", "add one"), Bound(2.0, 1e-5, "RDP", "replace one")
    report = Report((first, other))
    assert [output.bound_label(bound, report) for bound in report.bounds] == ["ε PLD", "ε RDP, replace one"]
