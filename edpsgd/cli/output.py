"""What the command prints: pages, JSON, and one line for bad input."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from edpsgd import escaping
from edpsgd.ledger.guarantee import Bound, Report


class Refused(Exception):
    """Bad input; the text is the line to print."""


def refuse(args: argparse.Namespace, message: str) -> NoReturn:
    """Ends the command that the arguments are of, with a message that begins with "argument --flag: ".

    Raises:
        Refused: with the line to print.
    """
    report_error: Callable[[str], NoReturn] = args.refuse
    report_error(message)


def json_page(data: Any) -> str:
    """Data as indented JSON, in which NaN and infinities are strings."""
    return json.dumps(escaping.json_ready(data), indent=2, allow_nan=False)


def rounded_up(z: float) -> str:
    """A noise multiplier with seven digits, rounded up: less noise would cost more than the target."""
    unit = 10.0 ** (math.floor(math.log10(z)) - 6)
    return f"{math.ceil(z / unit) * unit:.7g}"


def table_lines(rows: list[list[str]], cell_width: int) -> list[str]:
    """A line for each row: its first cell to the left, the others to the right."""
    width = max(len(row[0]) for row in rows)
    lines = []
    for name, *cells in rows:
        shown_cells = "  ".join(f"{cell:>{cell_width}}" for cell in cells)
        lines.append(f"  {name:<{width}}  {shown_cells}")
    return lines


def bound_label(bound: Bound, whole: Report) -> str:
    """The name of a bound's row, with its neighbours if they are others than those of the first bound."""
    has_other_neighbours = bound.neighbours != whole.bounds[0].neighbours
    return f"ε {bound.method}, {bound.neighbours}" if has_other_neighbours else f"ε {bound.method}"


def print_page(text: str) -> None:
    """Prints a text in the terminal's encoding, without characters that would steer the terminal.

    Raises:
        Refused: if it cannot be written.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        shown = escaping.visible(text, keep="\n")
        print(shown.encode(encoding, "replace").decode(encoding), flush=True)
    except OSError as error:  # a full disk, or a reader that has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Refused(f"edpsgd: error: the output cannot be written: {error.strerror}") from error
