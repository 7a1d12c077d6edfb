"""Writes the tables of the READMEs from the results: `python -m benchmarks.readme`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.report import readme_tables
from benchmarks.report.blocks import Block, Found, Table, Text, command

HERE = Path(__file__).parent
WHAT = {  # by their results: what commands measure
    "epoch_time": "an epoch of SGD, eDP-SGD, smaller units, vanilla DP-SGD and Opacus; memory; a cost model for more "
    "workers",
    "step_time": "single steps by length and batch, and where their time goes",
    "tradeoff": "the paper's Table 1 with its attack; error rate against ε by units",
    "recipes": "error rates by recipe at ε = 1, 3 and 8, what each part of the recipe is for, and units of clipping",
    "lira": "membership inference with 64 shadows on trainings of recipes",
    "audits": "lower bounds of μ and ε against what multipliers claim",
    "utility": "error rates of plain training, and the largest noise that leaves them within 5 %",
    "membership": "attacks on the trainings of utility, and on a model that knows its data by heart",
    "memorization": "what language models memorise of users",
    "exposure": "the rank of a canary with the language model of full size",
    "accounting": "speed and tightness of ε",
    "data_loading": "drawing and assembling batches",
    "attack_cost": "the features of an attack",
    "bench": "reduced versions of them, on generated data",
}


TIMED: dict[str, Callable[[results.Found], list[float]]] = {  # seconds that are in results without their duration
    "exposure": lambda found: [found[model]["seconds"] for model in ("unseen", "learned")],
    "data_loading": lambda found: [found[model]["epoch"]["seconds"] for model in ("clc", "bert")],
    "attack_cost": lambda found: [row[part] for row in found["rows"] for part in ("prediction", "features")],
}


def commands(_: Found) -> Iterator[Block]:
    """All commands, with the minutes that a whole run took."""
    yield Table[str](
        "",
        list(WHAT),
        {
            "command": lambda name: f"`{command(name, known(name) or {})}`",
            "what it measures": lambda name: WHAT[name],
            "minutes of work, two cores": lambda name: lasted(name, known(name)),
        },
    )


def known(name: str) -> results.Found | None:
    """The results of a benchmark; None if it was not run yet."""
    return results.load(name) if (results.RESULTS / f"{name}.json").exists() else None


def lasted(name: str, found: results.Found | None) -> str:
    """The minutes of a benchmark; where they were not written down, those of what it timed.

    Example:
        >>> lasted("data_loading", {"clc": {"epoch": {"seconds": 90.0}}, "bert": {"epoch": {"seconds": 60.0}}})
        'more than 2'
        >>> lasted("tradeoff", {"minutes": 11.7, "is_complete": False})
        '12 so far, not complete'
    """
    if found is None:
        return "not measured yet"
    if found.get("minutes"):
        rest = "" if found.get("is_complete", True) else " so far, not complete"
        return f"{max(1, round(found['minutes']))}{rest}"
    return f"more than {sum(TIMED[name](found)) / 60:.0f}" if name in TIMED else "not recorded"


# by file and mark: the results that a table is of, and what shows them
TABLES: dict[Path, dict[str, Callable[[Any], Iterator[Block]]]] = {
    HERE.parent / "README.md": {
        "epoch_time": readme_tables.epoch_time,
        "step_time": readme_tables.step_time,
        "frontier": readme_tables.frontier,
        "recipes": readme_tables.recipes,
    },
    HERE.parent / "tasks/README.md": {"utility": readme_tables.utility},
    HERE.parent / "mia/README.md": {
        "membership": readme_tables.membership,
        "memorization": readme_tables.memorization,
    },
    HERE / "README.md": {"commands": commands},
}
SOURCES = {"frontier": "tradeoff", "commands": "bench"}  # of marks that are not named after results


def updated(path: Path) -> str:
    """A README with each table between its marks."""
    text = path.read_text(encoding="utf-8")
    for name, show in TABLES[path].items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        table = "\n\n".join("\n".join(block.markdown()) for block in _blocks(SOURCES.get(name, name), show))
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def _blocks(name: str, show: Callable[[Any], Iterator[Block]]) -> Iterator[Block]:
    """What is shown of the results of a benchmark, or that they are not there."""
    found = known(name)
    if found is None:
        yield Text(f"Not measured yet: `{command(name, {})}` measures it.")
    else:
        yield from show(found)


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(updated(path), encoding="utf-8")
