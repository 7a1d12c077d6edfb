"""A tuning: a random number of trainings whose settings are drawn, one after the other, and the best of them.

Every training is one of tasks.train in a run folder of its own. Its noise is such that the whole, choice included,
costs the ε that was asked for. On public data there is nothing to pay, and as many trainings as were asked for.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import NamedTuple, TypeVar

from edpsgd import accounting, card, files
from edpsgd.accounting import TrialLaw
from edpsgd.ledger.guarantee import bound, format_epsilon
from edpsgd.ledger.records import RunRecord
from edpsgd.ledger.selection import Selection
from models.bert import BERT
from tasks.common import run_opening
from tasks.common.workers import Workers
from tasks.nlu import encoder_states, new_model, recipes
from tasks.nlu.configuration import Config
from tasks.nlu.dataset import Data, load
from tasks.nlu.training_job import train
from tasks.nlu.training_state import Diverged
from tasks.nlu.tuning import search_space, trial_noise, trial_score
from tasks.nlu.tuning.search_space import Candidate
from tasks.nlu.tuning.trial_noise import Shape
from tasks.nlu.tuning.trial_score import EXACT, NOISY, Scored, ScoreRule
from tasks.nlu.tuning.tuning_folder import Tuning, TuningFolder, best_of

T = TypeVar("T")

SHAPES = {"geometric": 1.0, "logarithmic": 0.0}  # of the laws
_STATES = ("model", "pretrained", "freeze", "features")  # what a frozen encoder's states depend on


@dataclass(frozen=True)
class Wishes:
    """What the command says beside the job's settings.

    Attributes:
        trials: how many trainings, on average; on public data exactly.
        law: of their number, a key of SHAPES.
        score: what the best is chosen by; None for the usual.
        search: a file of candidates; None for some around the job's settings.
        public: whether the training data are public, so that nothing is charged.
    """

    trials: float = 10.0
    law: str = "geometric"
    score: str | None = None
    search: str | None = None
    public: bool = False


class Tuned(NamedTuple):
    """What came of a tuning.

    Attributes:
        folder: of the tuning, private.
        best: the run folder of the best training.
        table: what was tried, to print; private.
        page: the card of the best training; None if it has none.
        settings: a file for --config, of what was chosen.
        is_free: whether nothing was charged.
    """

    folder: Path
    best: Path
    table: str
    page: str | None
    settings: Path
    is_free: bool


@files.private()
def tune(
    config: Config,
    wishes: Wishes,
    team: Workers,
    resume: Path | None = None,
    dry_run: bool = False,
    chosen: Collection[str] | None = None,
) -> Tuned | None:
    """A whole tuning; None if it is only planned.

    Args:
        config: the job's settings, around which is searched.
        wishes: what a tuning has beside them; one that goes on has its own.
        team: who takes part.
        resume: the folder of a tuning that goes on.
        dry_run: whether to plan only.
        chosen: names of the settings that are to stay; all others follow a recipe. None: all stay.
    """
    data = team.together(lambda: load(config, None, 0))
    if chosen is not None:
        config = recipes.by_recipe(config, chosen, len(data.rows.train), team)
    if resume is None:
        # What is drawn differs between the workers: that of worker 0 holds.
        tuning = team.collective.gather(team.together(lambda: _drawn(config, wishes, data, team)))[0]
    else:
        tuning = team.together(TuningFolder(resume).read)
        tuning.check_same(_sizes(data), team.collective.size)
    _say(team, _plan_text(config, tuning))
    if dry_run:
        return None
    if resume is None:
        path = run_opening.new_folder(config.output, f"tune-{config.task}-{config.model}", team)
        team.on_first(lambda: TuningFolder(path).begin(config, tuning))
    job = _Job(config, tuning, TuningFolder(resume or path), data, team)
    job.run()
    return job.end()


# -------------------------------------------------------------------- before the first training


def check_private(config: Config, rule: ScoreRule) -> None:
    """Refuses what no ε of a tuning could cover."""
    refused = {
        "seed": (config.seed is not None, "it would repeat the noise in every training"),
        "canaries": (config.canaries > 0, "they are for the audit of a single training"),
        "early-stopping": (config.early_stopping is not None, "it looks at validation data: search epochs instead"),
        "noise": (config.noise == "paper", "the published algorithm's noise holds no promised ε"),
        "layer-scaling": (config.layer_scaling == "raw", "raw norms are covered by no ε: use none or private:Z"),
    }
    for flag, (is_given, why) in refused.items():
        if is_given:
            raise ValueError(f"--{flag} {getattr(config, flag.replace('-', '_'))} is not for a private tuning: {why}")
    if rule.kind == NOISY and config.split != "hash":
        raise ValueError("--score noisy needs --split hash: in a random one, an utterance moves others to validation")
    if rule.kind == NOISY and rule.noise is None and config.epsilon is None:
        raise ValueError("--score noisy:Z must say Z, where --noise-multiplier says the noise of the trainings")


def _sizes(data: Data) -> dict[str, int]:
    return {name: len(part) for name, part in vars(data.rows).items()}


def _drawn(config: Config, wishes: Wishes, data: Data, team: Workers) -> Tuning:
    """What is fixed before the first training."""
    is_free = wishes.public or config.private == "off"
    rule = ScoreRule.parse(wishes.score or (EXACT if is_free else NOISY))
    if is_free and rule.kind == NOISY:
        raise ValueError("--score noisy is for private data: where nothing is charged, use exact or public:FILE")
    if not is_free:
        check_private(config, rule)
    Scored.of_rule(rule, data)  # a file that cannot be read is found out now
    examples, workers = len(data.rows.train), team.collective.size
    candidates = _candidates(config, wishes, examples, workers)
    configs = search_space.configs(config, candidates)
    shapes = [trial_noise.shape_of(one, examples, team.collective) for one in configs]
    unpaid = Tuning(
        candidates=candidates,
        multipliers=[None] * len(candidates),
        drawn=[],
        score=rule.text(),
        selection=None,
        sizes=_sizes(data),
        workers=workers,
    )
    return _with_free_draws(unpaid, config, wishes) if is_free else _with_paid_draws(unpaid, config, wishes, shapes)


def _candidates(config: Config, wishes: Wishes, examples: int, workers: int) -> list[Candidate]:
    if wishes.search is not None:
        return search_space.read(wishes.search)
    return search_space.around(config, most=examples // (workers * config.micro_batches))


def _with_free_draws(tuning: Tuning, config: Config, wishes: Wishes) -> Tuning:
    """As many trainings as were asked for, of different candidates as far as there are so many."""
    random = SystemRandom() if config.seed is None else Random(config.seed)
    drawn: list[int] = []
    while len(drawn) < max(1, round(wishes.trials)):
        drawn += random.sample(range(len(tuning.candidates)), len(tuning.candidates))
    return replace(tuning, drawn=drawn[: max(1, round(wishes.trials))])


def _with_paid_draws(tuning: Tuning, config: Config, wishes: Wishes, shapes: Sequence[Shape]) -> Tuning:
    """A random number of trainings, each of a candidate that is drawn independently of all others and of the data."""
    law, rule = TrialLaw(wishes.trials, SHAPES[wishes.law]), ScoreRule.parse(tuning.score)
    multipliers = _multipliers(config, shapes, law)
    if rule.kind == NOISY and rule.noise is None and config.epsilon is not None:
        # An utterance that is scored is in no training: its score may cost as much as the trainings may others.
        rule = replace(rule, noise=accounting.calibrate_selected(config.epsilon, config.delta, 1, law))
    plans = [shape.planned(z) for shape, z in zip(shapes, multipliers, strict=True)]
    selection = Selection(
        mean=float(law.mean),
        shape=law.shape,
        score=rule.kind,
        score_noise=rule.noise,
        held_out=rule.kind == NOISY,
        candidates=tuple(dict.fromkeys(plans)),
        id=secrets.token_hex(8),
    )
    entropy = SystemRandom()
    number = law.number(entropy.random())
    drawn = [entropy.randrange(len(shapes)) for _ in range(number)]
    return replace(tuning, multipliers=list(multipliers), drawn=drawn, score=rule.text(), selection=selection.to_json())


def _multipliers(config: Config, shapes: Sequence[Shape], law: TrialLaw) -> list[float]:
    """The noise multiplier of each candidate's first epoch."""
    if config.epsilon is None:
        return [config.noise_multiplier or 0.0] * len(shapes)
    found = trial_noise.calibrated(shapes, config.epsilon, config.delta, law)
    return [found[shape] for shape in shapes]


def _plan_text(config: Config, tuning: Tuning) -> str:
    """The plan, to print; never how many trainings were drawn."""
    rule, selection = ScoreRule.parse(tuning.score), tuning.record
    lines = [f"tuning of {config.task}: {len(tuning.candidates)} candidates"]
    if selection is None:
        lines.append("  nothing is charged, and nothing has to be if the utterances are public")
    else:
        law = {shape: name for name, shape in SHAPES.items()}[selection.shape]
        found = bound([], config.delta, [RunRecord(selection=selection)])
        multipliers = [z for z in tuning.multipliers if z is not None]
        lines += [
            f"  a random number of trainings, {selection.mean:g} on average ({law} law), of which the best is released",
            f"  ε = {format_epsilon(found.epsilon)} at δ = {config.delta:g} for all of them and the choice",
            f"  noise multiplier  {min(multipliers):.6g} to {max(multipliers):.6g} in the first epoch",
        ]
    return "\n".join([*lines, f"  the best by {rule.in_words()}"])


# -------------------------------------------------------------------- the trainings


class _Job:
    """The trainings of a tuning, one after the other.

    Args:
        config: the job's settings.
        tuning: what is fixed.
        folder: where it is kept.
        data: of the job.
        team: who takes part.
    """

    def __init__(self, config: Config, tuning: Tuning, folder: TuningFolder, data: Data, team: Workers) -> None:
        self._config, self._tuning, self._folder, self._data, self._team = config, tuning, folder, data, team
        self._rule = ScoreRule.parse(tuning.score)
        self._configs = search_space.configs(config, tuning.candidates)

    def run(self) -> None:
        """All trainings that are left."""
        if self._known(self._folder.best.exists()):
            return
        scored = self._team.together(lambda: Scored.of_rule(self._rule, self._data))
        states_from = self._shared_states()
        for number in range(len(self._tuning.drawn)):
            if number in self._known(self._folder.scores()):
                continue
            score = self._train(number, states_from, scored)
            self._team.on_first(partial(self._folder.note, number, score))
            self._team.on_first(self._folder.keep_best)

    def _train(self, number: int, states_from: str | None, scored: Scored) -> float:
        """One training, and its score."""
        folder, team = self._folder.training(number), self._team
        config = replace(self._settings(number), output=str(folder), states_from=states_from, keep_features=False)
        _say(team, f"\ntraining {number + 1}   {self._in_words(number)}")
        if not self._known(self._folder.has_ended(number)):
            team.on_first(partial(self._folder.clear, number))
            try:
                train(config, team, selection=self._tuning.record)
            except Diverged as error:  # which counts as the worst outcome, and is not tried again
                _say(team, f"diverged: {error}")
                return -math.inf
        return trial_score.measure(self._rule, scored, folder, config, team)

    def _settings(self, number: int) -> Config:
        """Those of a training, with its noise."""
        drawn = self._tuning.drawn[number]
        multiplier = self._tuning.multipliers[drawn]
        if multiplier is None:
            return self._configs[drawn]
        return replace(self._configs[drawn], epsilon=None, noise_multiplier=multiplier)

    def _shared_states(self) -> str | None:
        """Where trainings find the states of a frozen encoder, which are computed once; None if each has its own."""
        config, team = self._config, self._team
        is_frozen = config.model == "bert" and config.freeze == "encoder"
        is_given = config.pretrained is not None or config.init_from is not None  # else it is drawn at random
        alike = all(getattr(one, name) == getattr(config, name) for one in self._configs for name in _STATES)
        if config.states_from is not None or not (is_frozen and is_given and alike):
            return config.states_from
        corpus = self._data.corpus
        parts = team.together(lambda: new_model.build(config, corpus, self._data.rows.train))
        if not isinstance(parts.model, BERT):
            return None
        table = parts.inputs.table(corpus.words)
        kept = replace(config, keep_features=True)
        encoder_states.compute(kept, team, self._folder.path, parts.model.to(team.device), corpus, table)
        return str(self._folder.path)

    def _known(self, value: T) -> T:
        """What worker 0 knows of the folder."""
        return self._team.collective.gather(value)[0]

    # ---------------------------------------------------------------- the end

    def end(self) -> Tuned:
        """Releases the best training."""
        number = best_of(self._known(self._folder.scores()))
        self._team.on_first(partial(self._release, number))
        folder, is_free = self._folder, self._tuning.selection is None
        return Tuned(folder.path, folder.best, self._table(), self._page(), folder.settings, is_free)

    def _release(self, number: int | None) -> None:
        if number is None:
            raise ValueError("all trainings diverged, to NaN or infinities: search smaller learning rates")
        config = replace(self._settings(number), output=str(self._folder.best))
        self._folder.release(number, config)
        if not self._config.keep_features:
            encoder_states.delete(self._folder.path)

    def _page(self) -> str | None:
        """The card of the best training."""
        path = self._folder.best / f"{card.NAME}.md"
        return files.read_text(path) if path.exists() else None

    def _table(self) -> str:
        """What was tried."""
        scores = self._folder.scores()
        lines = []
        for number, score in sorted(scores.items(), key=lambda entry: -entry[1]):
            shown = "diverged" if score == -math.inf else f"{score:.2f} %"
            lines.append(f"{number + 1:>8}   {shown:>9}   {self._in_words(number)}")
        return "\n".join([f"{'training':>8}   {'right':>9}   settings", *lines])

    def _in_words(self, number: int) -> str:
        """The settings of a training that were searched."""
        candidate = self._tuning.candidates[self._tuning.drawn[number]]
        searched = search_space.searched(self._tuning.candidates)
        return ", ".join(f"{name} {candidate[name]}" for name in searched if name in candidate)


def _say(team: Workers, text: str) -> None:
    if team.is_first:
        print(text, flush=True)
