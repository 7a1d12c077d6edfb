"""One training of a language model, from its settings to weights, test and card in the run folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from edpsgd import BudgetExhausted, Ledger, card, files
from edpsgd.card import Card
from edpsgd.ledger.guarantee import format_epsilon
from edpsgd.planning import as_if
from models.language_model import LanguageModel
from tasks.common import checkpoints, progress
from tasks.common.run_opening import WEIGHTS, new_folder, open_again
from tasks.common.workers import Workers
from tasks.language.configuration import Config
from tasks.language.dataset import Texts, load_texts
from tasks.language.next_word import NextWord, evaluate
from tasks.language.noise_plan import plan_text
from tasks.language.run_folder import begin_run, not_covered
from tasks.language.training_loops import SentenceTraining, UserTraining


@files.private()
def train(config: Config, team: Workers, resume: Path | None = None, dry_run: bool = False) -> NextWord | None:
    """A whole job; the test on held-out users, on worker 0."""
    texts = team.together(lambda: load_texts(config))
    _say(team, *_summary(config, texts, team))
    if dry_run:
        return None
    if resume is not None:
        team.on_first(lambda: open_again(resume, config.is_private))
    folder = resume or new_folder(config.output, f"{config.task}-{config.algorithm}", team)
    torch.manual_seed(torch.seed() if config.seed is None else config.seed)
    model = LanguageModel(len(texts.dictionary), config.dimension, config.hidden).to(team.device)
    team.broadcast(model)
    if resume is None:
        team.on_first(lambda: begin_run(folder, config, model, texts.dictionary))
    return _Job(config, team, texts, model, folder).run(resume is not None)


class _Job:
    """One training, with its checkpoints and tests."""

    def __init__(self, config: Config, team: Workers, texts: Texts, model: LanguageModel, folder: Path) -> None:
        self._config, self._team, self._texts, self._model, self._folder = config, team, texts, model, folder
        self._training = self._make_training()
        self._round, self._seconds = 0, 0.0

    def _make_training(self) -> UserTraining | SentenceTraining:
        if self._config.algorithm == "sgd":
            return SentenceTraining(self._config, self._team, self._model, self._texts.train)
        return UserTraining(self._config, self._team, self._model, self._texts.train, self._folder)

    @property
    def _ledger(self) -> Ledger | None:
        if self._config.is_private and isinstance(self._training, UserTraining):
            return self._training.optimizer.ledger
        return None

    def run(self, is_resumed: bool) -> NextWord | None:
        """All rounds that are left, and the last test."""
        if is_resumed:
            self._load()
        shown = self._team.together(self._open_progress)
        try:
            self._rounds(shown)
            return self._team.on_first(self._finish)
        finally:
            shown.close()
            if self._ledger is not None:
                self._ledger.close()

    def _open_progress(self) -> progress.Progress:
        return progress.Progress(
            self._folder,
            total=self._config.rounds,
            done=self._round,
            is_shown=self._team.is_first,
            tensorboard=self._config.tensorboard,
        )

    def _rounds(self, shown: progress.Progress) -> None:
        try:
            while self._round < self._config.rounds:
                started = time.monotonic()
                self._training.step(self._round)
                self._seconds += time.monotonic() - started
                self._round += 1
                shown.move()
                if shown.wants():
                    shown.show(self._cost())
                if self._round % self._config.checkpoint_every == 0:
                    self._test(shown)
                    self._save()
        except BudgetExhausted as error:  # rounds that ran again after a crash were paid for twice
            self._save()
            shown.say(f"the budget is used up: {error}")

    def _cost(self) -> str:
        """ε so far, to show; nothing without noise."""
        if self._ledger is None:
            return ""
        return f"ε {progress.short(self._ledger.epsilon(self._config.delta))}"

    def _test(self, shown: progress.Progress) -> None:
        """Tests on the held-out users, on worker 0."""
        self._check_weights()

        def work() -> None:
            found = evaluate(self._model, self._texts.test)
            shown.record({"step": self._round, "seconds": round(self._seconds, 3), **_numbers(found, "held_out_")})
            text = f"accuracy {found.accuracy:.2%}   perplexity {found.perplexity:.1f}   {self._cost()}"
            shown.say(f"round {self._round}/{self._config.rounds}   {text}   {self._seconds:.0f} s")

        self._team.on_first(work)

    def _finish(self) -> NextWord:
        """Weights and card; the test comes last, and says that the run is complete."""
        self._check_weights()
        checkpoints.save_weights(self._folder / WEIGHTS, self._model.state_dict())
        found = evaluate(self._model, self._texts.test)
        numbers = _numbers(found, "test_")
        written = self._write_card(numbers)
        last = {"step": self._round, "seconds": round(self._seconds, 3), **numbers}
        if written is not None:
            last["epsilon"] = float(written.epsilon)
        progress.record(self._folder, last)
        files.write_text(self._folder / "head_words.json", json.dumps(found.head))
        page = "" if written is None else written.markdown()
        print(test_table(found, self._seconds), *self._outlook(), page, sep="\n")
        print(f"run folder: {self._folder}")
        return found

    def _write_card(self, numbers: dict[str, float]) -> Card | None:
        if self._ledger is None:
            return None
        rounded = {name: round(value, 4) for name, value in numbers.items()}
        return card.write(self._folder, self._ledger, self._config.delta, rounded, not_covered(self._config))

    def _outlook(self) -> list[str]:
        """What the same noise would cost with more users."""
        config = self._config
        if self._ledger is None or config.as_if_users is None or config.as_if_cohort is None:
            return []
        epsilon = as_if(self._ledger, config.delta, config.as_if_users, config.as_if_cohort)
        return [
            f"with {config.as_if_users} users, {config.as_if_cohort:g} of them in a round, the same noise on the mean "
            f"update would give ε = {format_epsilon(epsilon)} at δ = {config.delta:g}"
        ]

    def _check_weights(self) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self._model.parameters()):
            raise ValueError(f"after round {self._round} the model holds NaN or infinities: choose smaller rates")

    def _save(self) -> None:
        state = {"round": self._round, "seconds": self._seconds}
        optimizer, place = self._training.state_dict(), self._folder / "checkpoints"
        weights = self._model.state_dict()
        self._team.on_first(lambda: checkpoints.save(place, self._round, weights, optimizer, state))

    def _load(self) -> None:
        weights, optimizer, state = self._team.together(lambda: checkpoints.load(self._folder / "checkpoints"))
        self._model.load_state_dict(weights)
        self._training.load_state_dict(optimizer)
        self._round, self._seconds = state["round"], state["seconds"]
        self._team.on_first(lambda: progress.drop_later_lines(self._folder, self._round))


def test_table(found: NextWord, seconds: float) -> str:
    """The test, to read."""
    head = f"{'accuracy':>10}{'top 3':>9}{'top 5':>9}{'perplexity':>12}{'words':>9}{'time':>9}"
    shares = "".join(f"{share:>9.2%}" for share in (found.top3, found.top5))
    return f"\n{head}\n{found.accuracy:>10.2%}{shares}{found.perplexity:>12.1f}{found.words:>9}{seconds:>7.0f} s"


def _numbers(found: NextWord, prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in asdict(found).items() if name != "head"}


def _summary(config: Config, texts: Texts, team: Workers) -> list[str]:
    train, test = texts.train, texts.test
    number = team.collective.size
    plural = "s" if number > 1 else ""
    lines = [
        f"{config.task}: {len(train)} training users with {len(train.tokens)} words, {len(test)} held-out users; "
        f"dictionary of {len(texts.dictionary)}",
        f"{config.algorithm} on {number} worker{plural}, {config.rounds} rounds",
    ]
    if config.algorithm != "sgd":
        lines.append(plan_text(config, train, team.collective))
    return lines


def _say(team: Workers, *texts: str) -> None:
    if team.is_first:
        print(*texts, sep="\n", flush=True)
