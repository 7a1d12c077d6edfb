"""The training loop: epochs, their steps, validation, and the end. It reads from top to bottom.

A step is in training_step.py, the optimizer in training_optimizer.py, checkpoints are in
training_state.py, and the figures of an epoch in training_figures.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Iterator
from pathlib import Path

import torch

import edpsgd
from edpsgd.sampling.base import Batches
from models.clc import CLC
from models.heads import IntentSlotModel
from tasks.common import progress
from tasks.common.workers import Workers
from tasks.nlu.configuration import Config
from tasks.nlu.evaluation import evaluate
from tasks.nlu.example_batches import Examples
from tasks.nlu.noise_plan import Plan
from tasks.nlu.run_folder import Parts
from tasks.nlu.training_figures import LossSum, epoch_figures, figures_text
from tasks.nlu.training_optimizer import make_optimizer, set_rates
from tasks.nlu.training_state import State, TrainingCheckpoints
from tasks.nlu.training_step import (
    MicroBatches,
    StepLosses,
    dropout_seed,
    micro_batches_of_steps,
    plain_backward,
    private_backward,
)

__all__ = ["State", "Training"]

_CHECKED = 6  # utterances that are tried in changing company before the first step


class Training:
    """One training of one model.

    Args:
        config: the settings.
        workers: who takes part.
        parts: the model and its labels; the model is moved to the worker's device.
        batches: the sampler.
        plan: the noise, None for plain training.
        folder: the run folder.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        parts: Parts,
        batches: Batches,
        plan: Plan | None,
        folder: Path,
    ) -> None:
        self.config, self.workers, self.parts = config, workers, parts
        self.batches, self.folder = batches, folder
        self.state = State()
        self.model = _prepare_model(config, workers, parts.model)
        self._seed = secrets.randbits(62) if config.seed is None else config.seed
        self._plan = plan
        self.optimizer = make_optimizer(config, workers, self.model, batches, plan, folder)
        self._checkpoints = TrainingCheckpoints(folder, workers, self.model, self.optimizer, batches)
        self._loss_sum = LossSum(workers.device)
        self._losses = StepLosses(self.model, config, workers.device, self._loss_sum)
        self._blanks: Container[int] = ()
        self._since: float | None = None  # when the clock was started, while it runs

    @property
    def private(self) -> edpsgd.PrivateOptimizer | None:
        """The optimizer, if it is a private one."""
        return self.optimizer if isinstance(self.optimizer, edpsgd.PrivateOptimizer) else None

    @property
    def total_steps(self) -> int:
        """Of all epochs."""
        return self.config.epochs * self.batches.steps_per_epoch

    def run(self, train: Examples, validation: Examples, blanks: Container[int] = ()) -> None:
        """All epochs that are left; a budget that is used up and early stopping end them before.

        Args:
            train: what is trained on.
            validation: what tells the error rate after each epoch.
            blanks: numbers of training examples that are drawn like the others, and then left out.
        """
        self._blanks = blanks
        if self.private is not None:
            self.workers.together(lambda: self._check_losses(train))
        shown = self.workers.together(self._open_progress)
        try:
            while self.state.epoch < self.config.epochs and not self.state.is_stopped:
                self._epoch(train, validation, shown)
        except edpsgd.BudgetExhausted as error:
            self._end_early(error, shown)
        finally:
            shown.close()
        self._restore_best()

    def _check_losses(self, train: Examples) -> None:
        """Refuses a model whose losses depend on other utterances; all workers try the same."""
        rows = train.of_different_lengths(_CHECKED, self._blanks)
        if len(rows) >= 2 and self.private is not None:
            edpsgd.check_losses(
                lambda chosen: self._losses.of_batch(train.batch(chosen)),
                rows,
                model=self.model,
                optimizer=self.private,
            )

    def _open_progress(self) -> progress.Progress:
        return progress.Progress(
            self.folder,
            total=self.total_steps,
            done=self.state.step,
            is_shown=self.workers.is_first,
            tensorboard=self.config.tensorboard,
        )

    def close(self) -> None:
        """Lets go of the ledger file, with the exact number of steps in it."""
        if self.private is not None:
            self.private.ledger.close()

    # ---------------------------------------------------------------- an epoch

    def _epoch(self, train: Examples, validation: Examples, shown: progress.Progress) -> None:
        epsilon = self._begin_epoch()
        self._count_seconds(go_on=True)
        for micro_batches in self._steps():
            self._step(train, micro_batches)
            shown.move()
            if shown.wants():
                shown.show(figures_text(self._figures(), epsilon))
            if self._wants_checkpoint():
                self._count_seconds(go_on=False)
                self.save_checkpoint()
                self._count_seconds(go_on=True)
        self._count_seconds(go_on=False)
        self._end_epoch(validation, shown)

    def _begin_epoch(self) -> progress.EpsilonSoFar | None:
        """Begins a new pass over the data, or goes on with one; ε as it grows, if there is one."""
        if self.private is not None:
            self.private.set_epoch(self.state.epoch)
            return progress.EpsilonSoFar(self.private, self.config.delta)
        is_in_the_middle = 0 < self.batches.position < self.batches.steps_per_epoch
        if not is_in_the_middle:
            self.batches.set_epoch(self.state.epoch)
        return None

    def _steps(self) -> Iterator[MicroBatches]:
        """The micro-batches of each step that is left of the epoch."""
        return micro_batches_of_steps(self.batches, self._blanks)

    def _step(self, train: Examples, micro_batches: MicroBatches) -> None:
        """One step of the optimizer."""
        # Rates follow from the place in the training, so that a resumed run has the same.
        steps_taken = self.state.epoch * self.batches.steps_per_epoch + self.batches.position
        set_rates(self.optimizer, self.config, steps_taken, self.total_steps)
        torch.manual_seed(dropout_seed(self._seed, self.workers.collective.rank, self.state.step))
        self.optimizer.zero_grad()
        if self.private is None:
            plain_backward(self._losses, train, micro_batches)
        else:
            private_backward(
                self.private,
                self._losses,
                train,
                micro_batches,
                is_example_unit=self.config.private == "example",
                is_one_pass=self.batches.together,
            )
        self.optimizer.step()
        if self.private is None:
            self.batches.take()  # a private optimizer does so itself
        self.state.step += 1

    def _wants_checkpoint(self) -> bool:
        """In the middle of an epoch; the end has its own."""
        every = self.config.checkpoint_every
        is_wanted = every > 0 and self.state.step % every == 0
        return is_wanted and self.batches.position < self.batches.steps_per_epoch

    def _count_seconds(self, go_on: bool) -> None:
        """Of steps, not of validation and checkpoints."""
        now = time.monotonic()
        if self._since is not None:
            self.state.seconds += now - self._since
        self._since = now if go_on else None

    def _figures(self) -> dict[str, float]:
        """Of the epoch so far, by their names in metrics.jsonl."""
        mean_loss = self._loss_sum.mean_with(self.state)
        return epoch_figures(mean_loss, self.state.epoch, self.private, self._plan)

    # ---------------------------------------------------------------- the end of an epoch

    def _end_epoch(self, validation: Examples, shown: progress.Progress) -> None:
        """Validates, looks whether this epoch is the best, and writes a checkpoint."""
        state = self.state
        self._checkpoints.check_weights(state.step)
        labels, workers = self.parts.labels, self.workers
        found = evaluate(self.model, validation, labels, workers.collective, workers.device)
        self._report_epoch(found, shown)
        self._look_for_best(found["ser"], shown)
        state.epoch += 1
        state.loss, state.utterances = 0.0, 0
        self._loss_sum.clear()
        self.save_checkpoint()

    def _report_epoch(self, found: dict[str, float], shown: progress.Progress) -> None:
        """The figures of the epoch, in metrics.jsonl and to people."""
        state, figures = self.state, self._figures()
        seconds = round(state.seconds, 3)
        line = {"epoch": state.epoch, "step": state.step, "seconds": seconds, **figures}
        epsilon_text: str | None = None
        if self.private is not None:
            bound = self.private.epsilon(self.config.delta)
            line["epsilon"] = float(bound)
            epsilon_text = progress.short(bound)
        line.update({f"validation_{name}": value for name, value in found.items()})
        self.workers.on_first(lambda: shown.record(line))
        shown.say(
            f"epoch {state.epoch + 1}/{self.config.epochs}   "
            f"{figures_text(figures, epsilon_text)}   "
            f"validation SER {found['ser']:.2f} %   {state.seconds:.0f} s"
        )

    def _look_for_best(self, ser: float, shown: progress.Progress) -> None:
        """With early stopping: keeps the best epoch, and stops if none has been better for long."""
        patience, state = self.config.early_stopping, self.state
        if patience is None:
            return
        if state.best is None or ser < state.best:
            state.best, state.best_epoch = ser, state.epoch
            self._checkpoints.save_best(state.epoch)
        elif state.epoch - state.best_epoch >= patience:
            state.is_stopped = True
            best = state.best_epoch + 1
            shown.say(f"no better SER on validation data since epoch {best}: stopped")

    # ---------------------------------------------------------------- the end of the training

    def _restore_best(self) -> None:
        """Early stopping keeps the model of the best epoch, and the card says who chose it."""
        if self.state.best is None:
            return
        self._checkpoints.restore_best(self.state.best_epoch)
        epoch = self.state.best_epoch + 1
        self.state.not_covered.append(
            f"the choice of epoch {epoch}: early stopping by the error rate on validation data"
        )

    def _end_early(self, error: edpsgd.BudgetExhausted, shown: progress.Progress) -> None:
        """Ends where the budget does: after a crash, steps that ran again have used up that of the last ones."""
        self._count_seconds(go_on=False)
        self.state.is_stopped = True
        epoch = self.state.epoch + 1
        self.state.not_covered.append(f"that the training ended early, in epoch {epoch}: budget used up")
        self.save_checkpoint()
        shown.say(f"the budget is used up: {error}")

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self) -> None:
        """Writes a checkpoint on worker 0; an error there is one on all workers."""
        self._loss_sum.move_into(self.state)
        self._checkpoints.save(self.state)

    def load_checkpoint(self) -> None:
        """Goes on from the last checkpoint of the run folder, which all workers load.

        If there is none, it begins from the start. Either way the ledger keeps what was charged.
        """
        loaded = self._checkpoints.load()
        if loaded is not None:
            self.state = loaded
        self.workers.on_first(lambda: progress.drop_later_lines(self.folder, self.state.step))


def _prepare_model(config: Config, workers: Workers, model: IntentSlotModel) -> IntentSlotModel:
    """The model on the worker's device, in training mode, with the weights of worker 0."""
    model = model.to(workers.device).train()
    if isinstance(model, CLC):
        model.keeps_apart = config.in_one_pass
    workers.broadcast(model)
    return model
