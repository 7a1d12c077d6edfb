"""All evidence to read: `python -m benchmarks.report` writes report.html, report.md and a page of each results file.

A page is the Markdown of its sections of the report. Every figure comes from the JSON files of the benchmarks. What was
not measured is named, with the command for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.results import RESULTS
from benchmarks.report.render import write_report


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="folder of the figures")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the report")
    flags = parser.parse_args(arguments)
    write_report(flags.results, flags.out)


if __name__ == "__main__":
    main()
