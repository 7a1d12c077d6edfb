"""What attackers learn from trained models: `python -m benchmarks.membership --data DIR`.

First a model that knows its few utterances by heart, and one that never saw them, under all attacks. Then, with the
paper's attack, every training of benchmarks.utility whose run folder is there: its shadow is the plain training on
another corpus.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from benchmarks.harness import results
from benchmarks.harness.results import machine
from benchmarks.harness.rows.membership import AttackedRun, AttackReport, Membership
from benchmarks.harness.settings import OVERFITTED, SHADOWS
from benchmarks.harness.trainings import final
from benchmarks.report.render import page
from mia import shadows
from mia.attack import ATTACKS, Attacker
from mia.candidates import Run, candidates, open_run
from mia.classifiers import membership
from mia.metrics import Report, evaluate
from mia.views import view

SHADOW = {"atis": "snips", "snips": "atis", "nlu-eval": "snips"}
JOBS = os.cpu_count() or 1  # a core for each: the models are small


def by_heart(folder: Path) -> dict[str, dict[str, AttackReport]]:
    """All attacks on a model that was trained for long on little, and on one that was trained on other data."""
    trained, other = replace(OVERFITTED, output=str(folder / "by-heart")), replace(OVERFITTED, data_seed=1)
    other = replace(other, output=str(folder / "never-saw"))
    shadows.train_all([trained, other], JOBS)
    target = open_run(folder / "by-heart")
    stranger = replace(target, parts=open_run(folder / "never-saw").parts)
    return {
        name: _all_attacks(Attacker(run, folder / "by-heart-mia"))
        for name, run in (("trained by heart", target), ("never saw them", stranger))
    }


def _all_attacks(attacker: Attacker) -> dict[str, AttackReport]:
    reports: dict[str, AttackReport] = {}
    for name in ATTACKS:
        if name == "loss":
            scores = attacker.loss()
        elif name == "shadow":
            scores = attacker.shadow(attacker.trained_on("generated", None))
        else:
            scores = attacker.with_shadows(name, SHADOWS, JOBS)
        known = scores == scores  # NaN where no shadow says anything
        report = evaluate(scores[known], attacker.about.members[known])
        reports[name] = cast(AttackReport, report.to_json())
    return reports


def on_corpora(runs: Path, data: str) -> list[AttackedRun]:
    """The paper's attack on every training that is there."""
    found: list[AttackedRun] = []
    complete = (path.parent for path in runs.glob("*/config.yaml") if final(path.parent))
    for folder in sorted(complete):
        run = open_run(folder, data)
        config = run.config
        if config.split != "random":
            continue
        shadow = runs / f"{SHADOW[config.task]}-{config.model}-random-0"
        report, near_duplicates = shadow_attack(run, shadow)
        row = {
            "name": folder.name,
            "model": config.model,
            "task": config.task,
            "private": config.private,
            "noise": config.noise,
            "noise_multiplier": config.noise_multiplier,
            "decay": config.decay,
            "near_duplicates": near_duplicates,
            **report.to_json(),
        }
        found.append(cast(AttackedRun, row))
        print(folder.name, row["auc"], flush=True)
    return found


def shadow_attack(run: Run, shadow: Path) -> tuple[Report, int]:
    """The paper's attack, with a plain training on another corpus as shadow; and the near duplicates it left out."""
    about = candidates(run.data, run.parts.labels)
    seen = view(run.parts, run.data.corpus, about.rows)
    scores = membership(*_learned(shadow, run.config.data), seen.features)
    return evaluate(scores, about.members), about.near_duplicates


@cache
def _learned(shadow: Path, data: str | None) -> tuple[Any, Any]:
    """Features of a shadow's utterances, and which it was trained on."""
    run = open_run(shadow, data)
    known = candidates(run.data, run.parts.labels)
    return view(run.parts, run.data.corpus, known.rows).features, known.members


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = results.parser("membership", __doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/utility"), metavar="DIR", help="of benchmarks.utility")
    parser.add_argument("--data", default="data", metavar="DIR", help="the folder of the corpora")
    parser.add_argument("--output", type=Path, default=Path("runs/membership"), metavar="DIR", help="for new models")
    flags = parser.parse_args(arguments)
    if not any(map(final, flags.runs.glob("*"))):
        parser.error(f"--runs {flags.runs} holds no complete training: run python -m benchmarks.utility first")
    start = time.monotonic()
    measured: Membership = {
        "command": results.command("membership", flags, "--data DIR"),
        "seed": 0,
        "machine": machine(),
        "by_heart": by_heart(flags.output),
        "corpora": on_corpora(flags.runs, flags.data),
    }
    minutes = (time.monotonic() - start) / 60
    found = results.merged(flags.out, "membership", measured, "corpora", lambda one: one["name"])
    if len(found["corpora"]) == len(measured["corpora"]):  # else it would have taken longer
        found["minutes"] = minutes
    results.save(flags.out, "membership", found, page("membership", found))


if __name__ == "__main__":
    main()
