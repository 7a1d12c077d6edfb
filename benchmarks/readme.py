"""Writes the tables of the README from the results: `python -m benchmarks.readme`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import membership, memorization, step_time, utility

README = Path(__file__).parent.parent / "README.md"
TABLES = {
    "step_time": step_time.readme_table,
    "utility": utility.readme_table,
    "membership": membership.readme_table,
    "memorization": memorization.readme_table,
}


def updated(text: str) -> str:
    """The README with each table between its marks."""
    for name, table in TABLES.items():
        results = json.loads((step_time.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table(results)}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
