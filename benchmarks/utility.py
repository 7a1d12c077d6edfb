"""Trainings on the real corpora, plain and private: `python -m benchmarks.utility --data DIR plain` (or `private`).

Every training is one command line of tasks.train on two Horovod workers, in a run folder of its own. A training that is
complete is not run again, and one that was interrupted begins again, so the benchmark may be stopped at any time. The
table is made of whatever run folders there are, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from benchmarks.harness import results, trainings
from benchmarks.harness.noise_search import WORKERS, Job, Search, Trainer, private, search_all
from benchmarks.harness.results import machine
from benchmarks.harness.rows.trainings import Flags, Metrics
from benchmarks.harness.rows.utility import Utility, UtilityRun
from benchmarks.report.render import page
from edpsgd import files
from tasks.common.flags import load_yaml

COMMAND = "python -m benchmarks.utility plain --data DIR && python -m benchmarks.utility private --data DIR"


def plain() -> list[Job]:
    """The paper's baselines, on its random split and on the hash split."""
    return [
        Job(model, task, split, 0, {"private": "off"})
        for split in ("random", "hash")
        for model in ("clc", "bert")
        for task in ("atis", "snips", "nlu-eval")
    ]


def all_private(train: Trainer, only: str) -> None:
    """Both corpora and models; at last what was found is run."""
    chosen = [(model, task) for task in ("atis", "snips") for model in ("clc", "bert") if only in f"{task}-{model}"]
    found = [(model, task, search_all(Search(model, task, train))) for model, task in chosen]
    for model, task, largest in found:
        for (decay, noise), z in largest.items():
            if z is not None:
                train(private(model, task, decay, noise, z))


def run(job: Job, data: Path, runs: Path) -> Metrics:
    """Trains unless it is done; the last line of its metrics."""
    found = trainings.train({**job.all_settings(), "data": data}, runs / job.folder, WORKERS)
    print(f"{job.folder}: SER {found['test_ser']:.2f}", flush=True)
    return found


# -------------------------------------------------------------------- the table


def collect(runs: Path) -> Utility:
    """Everything that complete run folders hold, JSON-ready."""
    found: list[UtilityRun] = []
    for folder in sorted(path.parent for path in runs.glob("*/config.yaml")):
        metrics = trainings.final(folder)
        if metrics is not None:
            settings = load_yaml(files.read_text(folder / "config.yaml"))
            kept = {name: value for name, value in settings.items() if name not in ("data", "output")}
            flags = cast(Flags, trainings.named(kept))
            data = files.read_json(folder / "data.json")
            found.append({"name": folder.name, "settings": flags, "metrics": metrics, "data": data})
    return {"command": COMMAND, "seed": 0, "machine": machine(), "workers": WORKERS, "runs": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = results.parser("utility", __doc__)
    parser.add_argument("what", choices=("plain", "private", "table"), help="which trainings; or only the table")
    parser.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="the folder of the corpora")
    parser.add_argument("--runs", type=Path, default=Path("runs/utility"), metavar="DIR", help="where runs go")
    parser.add_argument("--only", default="", metavar="TEXT", help="only runs whose name has this")
    flags = parser.parse_args(arguments)
    flags.runs.mkdir(parents=True, exist_ok=True)

    def train(job: Job) -> Metrics:
        return run(job, flags.data, flags.runs)

    if flags.what == "plain":
        for job in plain():
            if flags.only in job.folder:
                train(job)
    elif flags.what == "private":
        all_private(train, flags.only)
    found = results.merged(flags.out, "utility", collect(flags.runs), "runs", lambda run: run["name"])
    found["minutes"] = sum(run["metrics"]["seconds"] for run in found["runs"]) / 60
    results.save(flags.out, "utility", found, page("utility", found))


if __name__ == "__main__":
    main()
