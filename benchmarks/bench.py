"""Everything in small: `make bench`, which runs this, makes reduced versions of the benchmarks and their report.

They go to runs/bench, with bench.json for the minutes that each took; `--out DIR` puts that file elsewhere.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import results
from benchmarks.harness.rows.bench import Bench, BenchRow
from benchmarks.report.render import page, write_report

NAMES = (
    "audits", "accounting", "exposure", "attack_cost", "data_loading", "step_time", "epoch_time", "recipes",
    "tradeoff", "memorization",
)  # fmt: skip


def run(name: str) -> BenchRow:
    """One of them, in a process of its own."""
    print(f"benchmarks.{name}", flush=True)
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--reduced"], check=True)
    return {"name": name, "minutes": (time.monotonic() - start) / 60}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = results.parser("bench", __doc__)
    parser.set_defaults(out=results.REDUCED)
    flags = parser.parse_args(arguments)
    shutil.rmtree(results.REDUCED, ignore_errors=True)
    start = time.monotonic()
    rows = [run(name) for name in NAMES]
    minutes = (time.monotonic() - start) / 60
    found: Bench = {"command": "make bench", "minutes": minutes, "machine": results.machine(), "rows": rows}
    results.save(flags.out, "bench", found, page("bench", found))
    write_report(results.REDUCED, results.REDUCED)
    print(f"the report: {results.REDUCED / 'report.html'}, after {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
