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
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.results import machine
from benchmarks.harness.trainings import final
from mia import shadows
from mia.attack import ATTACKS, Attacker
from mia.candidates import Run, candidates, open_run
from mia.classifiers import membership
from mia.metrics import Report, evaluate
from mia.views import view
from tasks.config import Config

PAPER = {  # AUC of the attack on plain training in %, Table 1 of Dupuy et al. 2021
    ("clc", "atis"): 67.5,
    ("clc", "snips"): 70.6,
    ("clc", "nlu-eval"): 65.3,
    ("bert", "atis"): 56.1,
    ("bert", "snips"): 65.3,
    ("bert", "nlu-eval"): 63.6,
}
SHADOW = {"atis": "snips", "snips": "atis", "nlu-eval": "snips"}
SHADOWS = 16
JOBS = os.cpu_count() or 1  # a core for each: the models are small
OVERFITTED = Config(
    task="generated",
    examples=600,
    model="clc",
    hidden=48,
    layers=1,
    dimension=32,
    dropout=0.0,
    epochs=30,
    batch_size=16,
    learning_rate=5e-3,
    private="off",
    tensorboard=False,
    seed=0,
)


def by_heart(folder: Path) -> dict[str, dict[str, Any]]:
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


def _all_attacks(attacker: Attacker) -> dict[str, Any]:
    reports = {}
    for name in ATTACKS:
        if name == "loss":
            scores = attacker.loss()
        elif name == "shadow":
            scores = attacker.shadow(attacker.trained_on("generated", None))
        else:
            scores = attacker.with_shadows(name, SHADOWS, JOBS)
        known = scores == scores  # NaN where no shadow says anything
        reports[name] = evaluate(scores[known], attacker.about.members[known]).to_json()
    return reports


def on_corpora(runs: Path, data: str) -> list[dict[str, Any]]:
    """The paper's attack on every training that is there."""
    found = []
    for folder in sorted(path.parent for path in runs.glob("*/config.yaml") if final(path.parent)):
        run = open_run(folder, data)
        if run.config.split == "random":
            report, near_duplicates = shadow_attack(
                run, runs / f"{SHADOW[run.config.task]}-{run.config.model}-random-0"
            )
            names = ("model", "task", "private", "noise", "noise_multiplier", "decay")
            settings = {name: getattr(run.config, name) for name in names}
            found.append({"name": folder.name, **settings, "near_duplicates": near_duplicates, **report.to_json()})
            print(found[-1]["name"], found[-1]["auc"], flush=True)
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


# -------------------------------------------------------------------- the page


def page(found: dict[str, Any]) -> str:
    """The figures, to read."""
    lines = [
        "# What attackers learn",
        "",
        f"`{found['command']}`. In brackets {intervals(found)}; near duplicates of members and non-members are left "
        "out.",
        "",
        "## A model that knows its utterances by heart",
        "",
        f"CLC, {OVERFITTED.examples} generated utterances, {OVERFITTED.epochs} epochs, no dropout; LiRA and RMIA with "
        f"{SHADOWS} shadow models.",
        "",
        "| model | attack | AUC | balanced accuracy | TPR at 1 % FPR |",
        "|---|---|---|---|---|",
    ]
    for name, reports in found["by_heart"].items():
        for attack, report in reports.items():
            figures = " | ".join(_text(report[key]) for key in ("auc", "balanced_accuracy", "tpr_at_1_percent"))
            lines.append(f"| {name} | {attack} | {figures} |")
    lines += [
        "",
        "## The paper's attack on the corpora",
        "",
        "The trainings are those of benchmarks.utility, the shadow is the plain one on SNIPS (for SNIPS: on ATIS). "
        "Utterances that differ in slot values only are left out, and the trainings are short: both may be why CLC's "
        "AUCs are below the paper's, which was not looked into. One seed each; the error rates are in utility.md, and "
        "trainings whose SER is within 5 % of plain training's do not always have a lower AUC.",
        "",
    ]
    lines += ["| model | corpus | noise | decay | z0 | AUC | the paper's |", "|---|---|---|---|---|---|---|"]
    lines += [_row(one) for one in found["corpora"]]
    return "\n".join(lines) + "\n"


def intervals(found: dict[str, Any]) -> str:
    """What the brackets are: figures that were measured before evaluate() paid for its choices have a bootstrap's."""
    reports = [report for attacks in found["by_heart"].values() for report in attacks.values()] + found["corpora"]
    if any("resamples" in report for report in reports):
        return "95 % bootstrap intervals, too short for balanced accuracy and TPR, whose thresholds were not paid for"
    return "95 % intervals for any law of the scores"


def _row(one: dict[str, Any]) -> str:
    is_plain = one["private"] == "off"
    noise = ("none", "–", "–") if is_plain else (one["noise"], one["decay"], f"{one['noise_multiplier']:g}")
    paper = f"{PAPER[one['model'], one['task']] / 100:.3f}" if is_plain else "–"
    return f"| {' | '.join((one['model'], one['task'], *noise, _text(one['auc']), paper))} |"


def readme_table(found: dict[str, Any]) -> str:
    """What the paper's attack gets, for the README: from plain training, and from the private one with most noise."""
    lines = ["| AUC of the shadow attack | plain training | eDP-SGD, most noise |", "|---|---|---|"]
    for (model, task), paper in PAPER.items():
        ours = [one for one in found["corpora"] if (one["model"], one["task"]) == (model, task)]
        [plain] = [one for one in ours if one["private"] == "off"]
        noisy = max((one for one in ours if one["private"] == "edp"), key=noise, default=None)
        cells = f"{_text(plain['auc'])}, paper {paper / 100:.3f}", "–" if noisy is None else _text(noisy["auc"])
        lines.append(f"| {model.upper()}, {task.upper()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def noise(one: dict[str, Any]) -> tuple[float, bool, bool]:
    """To sort by: z0; of the same, noise that is not too small and does not decay is more."""
    return one["noise_multiplier"], one["noise"] == "calibrated", one["decay"] == "none"


def _text(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f}, {estimate['high']:.3f})"


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
    found = {"command": results.command("membership", flags, "--data DIR"), "seed": 0, "machine": machine()}
    found |= {"by_heart": by_heart(flags.output), "corpora": on_corpora(flags.runs, flags.data)}
    minutes = {"minutes": (time.monotonic() - start) / 60}
    new, found = len(found["corpora"]), results.merged(flags.out, "membership", found, "corpora", lambda o: o["name"])
    found |= minutes if len(found["corpora"]) == new else {}  # else it would have taken longer
    results.save(flags.out, "membership", found, page(found))


if __name__ == "__main__":
    main()
