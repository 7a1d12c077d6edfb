"""What an attacker learns from a trained model: `python -m mia.attack --run TARGET --attack shadow loss lira rmia`.

The report says how well members of the training set can be told from utterances that the model has never seen: a
table, report.json and a ROC curve. Near duplicates of each other are left out on both sides, and counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm import tqdm

from edpsgd import escaping, files
from mia import attacks, shadows
from mia.candidates import Candidates, Run, candidates, open_run
from mia.classifiers import CLASSIFIERS, membership
from mia.metrics import Report, evaluate, table
from mia.views import View, view
from models.bert import BERT
from tasks.common.workers import choose_device
from tasks.nlu import encoder_states
from tasks.nlu.configuration import TASKS, Config
from tasks.nlu.corpus import Rows
from tasks.nlu.encoder_states import EncoderStates
from tasks.nlu.run_folder import Parts, load
from tasks.nlu.splits import text_hashes

ATTACKS = ("shadow", "loss", "lira", "rmia")
OFFLINE_A = 1.0  # of RMIA: an utterance's probability is that of many labels together, and far below 1
FLOOR = 1e-12  # of losses; ours are computed in double precision
Scores = npt.NDArray[np.float64]
Given = tuple[Scores, Scores, npt.NDArray[np.bool_]]


class Attacker:
    """Attacks one run; models that it needs are trained when it first needs them.

    Args:
        target: the run.
        output: the folder of shadow models and of what they answered.
        device: where to compute.
        seed: of the draw of non-members, and of classifiers.
    """

    def __init__(self, target: Run, output: Path, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.target, self.output, self.device, self.seed = target, output, device, seed
        self.about = candidates(target.data, target.parts.labels, seed)
        files.make_private(output)
        self._seen = self._view(target.parts, target, self.about.rows)

    def loss(self) -> Scores:
        """A threshold on the loss."""
        return attacks.loss(self._seen.log_probabilities)

    def shadow(self, other: Run, classifier: str = "boosting") -> Scores:
        """The paper's attack. Utterances of the shadow that are in the target's corpus too teach nothing.

        Args:
            other: a run on other data, whose members the attacker knows.
            classifier: boosting, logistic or mlp.
        """
        known = candidates(other.data, other.parts.labels, self.seed)
        own, others = (text_hashes(run.data.corpus, seed=0) for run in (self.target, other))
        is_new = ~np.isin(others[known.rows], own)
        members = known.members[is_new]
        if not members.any() or members.all():
            raise ValueError(
                f"{int((~is_new).sum())} of {len(is_new)} utterances of the shadow {other.folder} are in the target's "
                "corpus too: it must be trained on other data"
            )
        learned = self._view(other.parts, other, known.rows[is_new])
        return membership(learned.features, members, self._seen.features, classifier, self.seed)

    def trained_on(self, task: str, data: str | None) -> Run:
        """A shadow of the target that is trained on another corpus."""
        config = shadows.on_task(self.target, self.output, task, data)
        shadows.train_all([config])
        return open_run(config.output or "")

    def with_shadows(self, name: str, number: int, jobs: int = 1, online: bool = True) -> Scores:
        """LiRA or RMIA, with shadows trained on random parts of the target's own corpus.

        Candidates that all shadows were trained on, or online none, get NaN: nothing is known about them.

        Args:
            name: lira or rmia.
            number: of shadows.
            jobs: how many are trained at a time.
            online: whether shadows that were trained on a candidate are used too.
        """
        if number < 2 or jobs < 1:
            raise ValueError(f"it takes at least 2 shadows and 1 job, got {number} and {jobs}")
        configs = shadows.like_target(self.target, self.output, number)
        shadows.train_all(configs, jobs)
        given = self._given(configs, self.about.rows, self._seen)
        judged = _covered(given[2], online)
        scores = np.full(len(judged), np.nan)
        chosen = _some(given, judged)
        if name == "lira":
            scores[judged] = attacks.lira(*chosen, online, floor=FLOOR)
            return scores
        population = self.about.population
        others = self._given(configs, population, self._view(self.target.parts, self.target, population))
        others = _some(others, _covered(others[2], online=False))
        scores[judged] = attacks.rmia(*chosen, others, None if online else OFFLINE_A)
        return scores

    def _given(self, configs: Sequence[Config], rows: Rows, seen: View) -> Given:
        """What target (as seen) and shadows say about rows, and which shadows were trained on them."""
        answers = [self._answers(Path(config.output or ""), rows) for config in configs]
        return seen.log_probabilities, np.stack(answers), shadows.insides(configs, self.target.data.corpus, rows)

    def _answers(self, folder: Path, rows: Rows) -> Scores:
        """What a shadow says, computed once."""
        file = folder / f"view-{blake2b(rows.tobytes(), digest_size=8).hexdigest()}.npz"
        if not file.exists():
            self._view(load(folder), self.target, rows).save(file)
        return View.load(file).log_probabilities

    def _view(self, parts: Parts, run: Run, rows: Rows) -> View:
        states = kept_states(parts, run)
        with tqdm(total=len(rows), unit="utterance", disable=None, leave=False) as bar:
            return view(parts, run.data.corpus, rows, self.device, bar.update, states)


def kept_states(parts: Parts, run: Run) -> EncoderStates | None:
    """What a model's encoder made of a run's utterances, if that run kept or read it; a shadow has the same encoder.

    Args:
        parts: the model, of the run itself or of a shadow.
        run: whose utterances they are.
    """
    folder = encoder_states.kept_by(run.folder, run.config)
    if folder is None or not isinstance(parts.model, BERT):
        return None
    return encoder_states.open_kept(folder, parts.model, run.data.corpus)


def _covered(inside: npt.NDArray[np.bool_], online: bool) -> npt.NDArray[np.bool_]:
    """Which points some shadow was not trained on and, online, another was."""
    return np.array([not column.all() and (column.any() or not online) for column in inside.T], bool)


def _some(given: Given, chosen: npt.NDArray[np.bool_]) -> Given:
    target, answers, inside = given
    return target[chosen], answers[:, chosen], inside[:, chosen]


# -------------------------------------------------------------------- the report


def write(output: Path, reports: Mapping[str, Report], about: Candidates, settings: Mapping[str, Any]) -> None:
    """report.json and roc.png."""
    content = {
        "settings": dict(settings),
        "near_duplicates_left_out": about.near_duplicates,
        "unknown_labels_left_out": about.unknown_labels,
        "attacks": {name: report.to_json(curve=True) for name, report in reports.items()},
    }
    files.write_text(output / "report.json", json.dumps(content, indent=1) + "\n")
    plot(output / "roc.png", reports)


def plot(path: Path, reports: Mapping[str, Report]) -> None:
    """ROC curves on logarithmic axes, where low false positive rates can be seen."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, report in reports.items():
        axes.step(report.fpr, report.tpr, where="post", label=f"{name}, AUC {report.auc.value:.3f}")
    least = 0.5 / max(max(report.members, report.non_members) for report in reports.values())
    axes.plot([least, 1], [least, 1], color="grey", linestyle=":", label="a guess")
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1))
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


# -------------------------------------------------------------------- the command


@files.private()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = _parsed(arguments)
    try:
        device = choose_device(flags.device)
        target = open_run(flags.run, flags.data)
        output = Path(flags.output or f"{target.folder}-mia")
        attacker = Attacker(target, output, device, flags.seed)
        about = attacker.about
        print(
            f"{int(about.members.sum())} members, {int((~about.members).sum())} non-members; left out: "
            f"{about.near_duplicates} near duplicates of each other, {about.unknown_labels} with unknown labels",
            flush=True,
        )
        reports = {}
        for name in dict.fromkeys(flags.attack):
            scores = _scores(attacker, name, flags)
            known = ~np.isnan(scores)
            reports[name] = evaluate(scores[known], about.members[known], seed=flags.seed)
        write(output, reports, about, vars(flags))
        print(f"{table(reports)}\n\n{output / 'report.json'}, {output / 'roc.png'}")
    except (ValueError, OSError) as error:
        sys.exit(escaping.visible(f"error: {error}", keep="\n"))


def _scores(attacker: Attacker, name: str, flags: argparse.Namespace) -> Scores:
    if name == "loss":
        return attacker.loss()
    if name in ("lira", "rmia"):
        return attacker.with_shadows(name, flags.shadows, flags.jobs, online=not flags.offline)
    if flags.shadow is not None:
        return attacker.shadow(open_run(flags.shadow, flags.shadow_data), flags.classifier)
    data = flags.shadow_data or flags.data or attacker.target.config.data
    return attacker.shadow(attacker.trained_on(flags.shadow_task, data), flags.classifier)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mia.attack", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", required=True, metavar="TARGET", help="the run folder to attack")
    parser.add_argument("--attack", nargs="+", choices=ATTACKS, default=["loss"], help="which attacks")
    parser.add_argument("--data", metavar="DIR", help="the data folder, if not where the run found it")
    parser.add_argument("--output", metavar="DIR", help="for shadows and the report; TARGET-mia if not given")
    parser.add_argument("--shadow", metavar="RUN", help="shadow: a run on other data")
    parser.add_argument("--shadow-task", choices=TASKS, help="shadow: train one as the target, on this corpus")
    parser.add_argument("--shadow-data", metavar="DIR", help="shadow: its data, if they are elsewhere")
    parser.add_argument("--classifier", choices=CLASSIFIERS, default=CLASSIFIERS[0], help="shadow: what learns")
    parser.add_argument("--shadows", type=int, default=8, metavar="N", help="lira, rmia: how many shadow models")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="lira, rmia: how many are trained at a time")
    parser.add_argument("--offline", action="store_true", help="lira, rmia: no shadow was trained on the candidate")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of draws and classifiers")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")
    flags = parser.parse_args(arguments)
    if "shadow" in flags.attack and flags.shadow is None and flags.shadow_task is None:
        parser.error("the attack shadow needs --shadow RUN, or --shadow-task TASK to train one")
    return flags


if __name__ == "__main__":
    main()
