"""The training loop: batches, losses, steps, validation, checkpoints. It reads from top to bottom."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch

import edpsgd
from edpsgd import files
from edpsgd.sampling.base import Batches
from models.clc import CLC
from tasks.common import checkpoints, progress
from tasks.common.run_opening import LEDGER
from tasks.common.workers import Workers
from tasks.nlu.configuration import Config
from tasks.nlu.evaluation import evaluate
from tasks.nlu.example_batches import Examples, to_device
from tasks.nlu.noise_plan import Plan, layer_scaling
from tasks.nlu.run_folder import Parts

MicroBatches = list[list[int]]
_CHECKED = 6  # utterances that are tried in changing company before the first step


@dataclass
class State:
    """Where a training stands; in every checkpoint."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # summed over the utterances of this epoch and worker 0
    utterances: int = 0
    best: float | None = None  # SER on validation data
    best_epoch: int = 0
    is_stopped: bool = False
    not_covered: list[str] = field(default_factory=list)


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
        self, config: Config, workers: Workers, parts: Parts, batches: Batches, plan: Plan | None, folder: Path
    ) -> None:
        self.config, self.workers, self.parts, self.batches, self.folder = config, workers, parts, batches, folder
        self.state = State()
        self.model = parts.model.to(workers.device).train()
        if isinstance(self.model, CLC):
            self.model.keeps_apart = config.in_one_pass
        workers.broadcast(self.model)
        self._seed = secrets.randbits(62) if config.seed is None else config.seed
        self._rates = _learning_rates(config)
        self._plan = plan
        self.optimizer = self._make_optimizer(plan)
        self._loss = torch.zeros((), device=workers.device)
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
        self._take_best()

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

    def _check_losses(self, train: Examples) -> None:
        """Refuses a model whose losses depend on other utterances; all workers try the same ones."""
        rows = train.of_different_lengths(_CHECKED, self._blanks)
        if len(rows) >= 2 and self.private is not None:
            edpsgd.check_losses(
                lambda chosen: self._losses(train.batch(chosen)), rows, model=self.model, optimizer=self.private
            )

    # ---------------------------------------------------------------- an epoch

    def _epoch(self, train: Examples, validation: Examples, shown: progress.Progress) -> None:
        epsilon = self._begin_epoch()
        self._count_seconds(go_on=True)
        for micro_batches in self._steps():
            self._step(train, micro_batches)
            shown.move()
            if shown.wants():
                shown.show(_text(self._figures(), epsilon))
            if self._wants_checkpoint():
                self._count_seconds(go_on=False)
                self.save_checkpoint()
                self._count_seconds(go_on=True)
        self._count_seconds(go_on=False)
        self._end_epoch(validation, shown)

    def _count_seconds(self, go_on: bool) -> None:
        """Of steps, not of validation and checkpoints."""
        now = time.monotonic()
        if self._since is not None:
            self.state.seconds += now - self._since
        self._since = now if go_on else None

    def _wants_checkpoint(self) -> bool:
        """In the middle of an epoch; the end has its own."""
        every = self.config.checkpoint_every
        is_wanted = every > 0 and self.state.step % every == 0
        return is_wanted and self.batches.position < self.batches.steps_per_epoch

    def _begin_epoch(self) -> progress.EpsilonSoFar | None:
        """A new pass over the data, or the rest of one."""
        if self.private is not None:
            self.private.set_epoch(self.state.epoch)
            return progress.EpsilonSoFar(self.private, self.config.delta)
        is_in_the_middle = 0 < self.batches.position < self.batches.steps_per_epoch
        if not is_in_the_middle:
            self.batches.set_epoch(self.state.epoch)
        return None

    def _steps(self) -> Iterator[MicroBatches]:
        """The sampler's batches, as many at a time as a step takes; or every single example as one."""
        drawn = iter(self.batches)
        number = 1 if self.batches.together else self.batches.micro_batches or 1
        while batches := list(islice(drawn, number)):
            if self.batches.micro_batches is None:  # single examples, drawn in one batch
                batches = [[row] for row in batches[0]]
            yield [self._without_blanks(unit) for unit in batches]

    def _without_blanks(self, rows: list[int]) -> list[int]:
        return [row for row in rows if row not in self._blanks]

    def _step(self, train: Examples, micro_batches: MicroBatches) -> None:
        """One step of the optimizer."""
        self._set_rates()
        torch.manual_seed(_derived(self._seed, self.workers.collective.rank, self.state.step))  # dropout's
        self.optimizer.zero_grad()
        if self.private is not None:
            self._private_backward(train, micro_batches)
        else:
            self._plain_backward(train, micro_batches)
        self.optimizer.step()
        if self.private is None:
            self.batches.take()  # a private optimizer does so itself
        self.state.step += 1

    def _plain_backward(self, train: Examples, micro_batches: MicroBatches) -> None:
        """The gradient of the mean over the micro-batches; an empty one counts as zero."""
        losses = [self._mean_loss(train, rows) for rows in micro_batches if rows]
        if losses:
            mean = torch.stack(losses).sum() / len(micro_batches)
            mean.backward()

    def _private_backward(self, train: Examples, micro_batches: MicroBatches) -> None:
        """One gradient per micro-batch; step() closes the last one if it has a gradient."""
        if self.config.private == "example":
            rows = [unit[0] for unit in micro_batches if unit]
            self._clip_examples(train, rows, len(micro_batches))
        elif self.batches.together:
            self._clip_together(train, micro_batches[0])
        else:
            self._clip_one_by_one(train, micro_batches)

    def _clip_one_by_one(self, train: Examples, micro_batches: MicroBatches) -> None:
        """A backward pass for each micro-batch."""
        for number, rows in enumerate(micro_batches, 1):
            if rows:
                self._mean_loss(train, rows).backward()
            is_closed_by_step = number == len(micro_batches) and bool(rows)
            if self.private is not None and not is_closed_by_step:
                self.private.accumulate()

    def _clip_examples(self, train: Examples, rows: list[int], drawn: int) -> None:
        """The gradient of every utterance by itself, those of a bucket in one pass; blank ones are empty."""
        if self.private is None:
            return
        for bucket in train.buckets(rows):
            losses = self._losses(bucket)
            self._loss += losses.detach().sum()
            self.private.backward(losses)
        self.state.utterances += len(rows)
        for _ in range(drawn - len(rows)):
            self.private.accumulate()

    def _clip_together(self, train: Examples, rows: list[int]) -> None:
        """All micro-batches of a step in one pass, empty ones too; the sampler knows which utterances are whose."""
        nothing = torch.zeros(0, device=self.workers.device)
        losses = self._losses(train.batch(rows)) if rows else nothing
        self._loss += losses.detach().sum()
        self.state.utterances += len(rows)
        if self.private is not None:
            self.private.backward(losses)

    def _mean_loss(self, train: Examples, rows: list[int]) -> torch.Tensor:
        """Of the utterances of a micro-batch, computed in buckets of similar length."""
        sums = [self._losses(bucket).sum() for bucket in train.buckets(rows)]
        total = torch.stack(sums).sum()
        self._loss += total.detach()
        self.state.utterances += len(rows)
        return total / len(rows)

    def _losses(self, bucket: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of every utterance."""
        device = self.workers.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            losses: torch.Tensor = self.model(to_device(bucket, device))
        return losses

    def _set_rates(self) -> None:
        """The learning rate is a function of the place in the training, so that a resumed run has the same."""
        taken = self.state.epoch * self.batches.steps_per_epoch + self.batches.position
        share = taken / self.total_steps
        factor = 1.0
        if self.config.warmup:  # it rises to 1, and the first step is above 0
            factor = min(factor, (share + 1 / self.total_steps) / self.config.warmup)
        if self.config.schedule == "linear":  # and falls to 0 after that
            factor = min(factor, (1 - share) / max(1e-9, 1 - self.config.warmup))
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    # ---------------------------------------------------------------- the end of an epoch

    def _end_epoch(self, validation: Examples, shown: progress.Progress) -> None:
        self._check_weights()
        found = evaluate(self.model, validation, self.parts.labels, self.workers.collective, self.workers.device)
        state, figures, text = self.state, self._figures(), None
        line = {"epoch": state.epoch, "step": state.step, "seconds": round(state.seconds, 3), **figures}
        if self.private is not None:
            bound = self.private.epsilon(self.config.delta)
            line["epsilon"], text = float(bound), progress.short(bound)
        line.update({f"validation_{name}": value for name, value in found.items()})
        self.workers.on_first(lambda: shown.record(line))
        shown.say(
            f"epoch {self.state.epoch + 1}/{self.config.epochs}   {_text(figures, text)}   "
            f"validation SER {found['ser']:.2f} %   {self.state.seconds:.0f} s"
        )
        self._look_for_best(found["ser"], shown)
        self.state.epoch += 1
        self.state.loss, self.state.utterances = 0.0, 0
        self._loss.zero_()
        self.save_checkpoint()

    def _look_for_best(self, ser: float, shown: progress.Progress) -> None:
        if self.config.early_stopping is None:
            return
        if self.state.best is None or ser < self.state.best:
            self.state.best, self.state.best_epoch = ser, self.state.epoch
            self.workers.on_first(self._save_best)
        elif self.state.epoch - self.state.best_epoch >= self.config.early_stopping:
            self.state.is_stopped = True
            shown.say(f"no better SER on validation data since epoch {self.state.best_epoch + 1}: stopped")

    def _take_best(self) -> None:
        """Early stopping keeps the model of the best epoch, and the card says who chose it."""
        if self.state.best is None:
            return
        self.workers.on_first(lambda: self._put(checkpoints.load_weights(self._best())))
        self.workers.broadcast(self.model)
        self.state.not_covered.append(
            f"the choice of epoch {self.state.best_epoch + 1}: early stopping by the error rate on validation data"
        )

    def _save_best(self) -> None:
        files.make_private(self._best().parent)
        checkpoints.save_weights(self._best(), self._trained())

    def _best(self) -> Path:
        """A file of its own for each epoch: that of the last checkpoint must stay until there is a newer one."""
        return self.folder / "checkpoints" / f"best-{self.state.best_epoch:06d}.safetensors"

    def _end_early(self, error: edpsgd.BudgetExhausted, shown: progress.Progress) -> None:
        """Steps that ran again after a crash have cost the budget of the last ones."""
        self._count_seconds(go_on=False)
        self.state.is_stopped = True
        self.state.not_covered.append(f"that the training ended early, in epoch {self.state.epoch + 1}: budget used up")
        self.save_checkpoint()
        shown.say(f"the budget is used up: {error}")

    def _check_weights(self) -> None:
        """All workers have the same, so that all of them raise the error."""
        norms = torch._foreach_norm(list(self._trained().values()))
        if not bool(torch.isfinite(torch.stack(norms)).all()):
            raise ValueError(
                f"after step {self.state.step} the model holds NaN or infinities: choose a smaller learning_rate, or "
                "a larger warmup. Checkpoints are from before"
            )

    # ---------------------------------------------------------------- figures

    def _figures(self) -> dict[str, float]:
        """Of worker 0, for people who run the job; no noise covers the loss and the clip fraction."""
        loss = (self.state.loss + float(self._loss)) / max(1, self.state.utterances)
        if self.private is None or self._plan is None:
            return {"loss": loss}
        factor = 1.0 if self._plan.decay is None else self._plan.decay(self.state.epoch)
        noise = self._plan.noise_multiplier * factor
        return {
            "loss": loss,
            "clip_fraction": self.private.clip_fraction,  # since the epoch or, after a resume, the process began
            "discarded": self.private.discarded,
            "noise_multiplier": noise,
        }

    # ---------------------------------------------------------------- the optimizer and checkpoints

    def _make_optimizer(self, plan: Plan | None) -> torch.optim.Optimizer:
        config = self.config
        heads = {id(p) for p in self.model.head_parameters()}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        of_encoder = [p for p in trained if id(p) not in heads]
        of_heads = [p for p in trained if id(p) in heads]
        groups = [{"params": of_encoder}, {"params": of_heads}]  # in the order of _learning_rates
        inner = torch.optim.AdamW(groups, weight_decay=config.weight_decay, fused=True)
        if plan is None:
            return self.workers.averaged(inner, self.model)
        edpsgd.check_model(self.model)
        budget = None if config.epsilon is None else edpsgd.Budget(config.epsilon, config.delta)
        return edpsgd.PrivateOptimizer(
            inner,
            self.model.named_parameters(),
            clip_norm=config.clip_norm,
            noise_multiplier=plan.noise_multiplier,
            noise_decay=plan.decay,
            clipping=config.clipping,
            unit="example" if config.private == "example" else "micro_batch",
            layer_scaling=layer_scaling(config),
            noise=config.noise,
            noise_placement=config.placement,
            collective=self.workers.collective,
            seed=config.seed,
            ledger=self.folder / LEDGER,
            batches=self.batches,
            budget=budget,
        )

    def _trained(self) -> dict[str, torch.Tensor]:
        """The tensors that change; the others are in the run folder's weights from the beginning."""
        names = {name for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in names}

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        """Puts all trained tensors, and nothing else, back into the model."""
        if weights.keys() != self._trained().keys():
            raise ValueError(f"the checkpoints in {self.folder} are of another model: they hold other tensors")
        self.model.load_state_dict(weights, strict=False)

    def save_checkpoint(self) -> None:
        """On worker 0; an error there, such as a full disk, is one on all workers."""
        self._check_weights()
        self.state.loss += float(self._loss)
        self._loss.zero_()
        optimizer, folder = self.optimizer.state_dict(), self.folder / "checkpoints"
        state = {"training": asdict(self.state), "batches": self.batches.state_dict()}

        def save() -> None:
            checkpoints.save(folder, self.state.step, self._trained(), optimizer, state)
            for best in folder.glob("best-*"):
                if best != self._best():
                    best.unlink()

        self.workers.on_first(save)

    def load_checkpoint(self) -> None:
        """Goes on from the last checkpoint of the run folder, which all workers load; if there is none, from the start.

        Either way the ledger keeps what was charged.
        """
        found = checkpoints.latest(self.folder / "checkpoints")
        if self.workers.collective.gather(found is not None)[0]:
            self.workers.together(self._load)
        self.workers.on_first(lambda: progress.drop_later_lines(self.folder, self.state.step))

    def _load(self) -> None:
        weights, optimizer, state = checkpoints.load(self.folder / "checkpoints")
        self._put(weights)
        self.state = State(**state["training"])
        self.optimizer.load_state_dict(optimizer)
        if self.private is None:
            self.batches.load_state_dict(state["batches"])


def _learning_rates(config: Config) -> list[float]:
    """Of the encoder and of the heads."""
    usual = 1e-3 if config.model == "clc" else 5e-5
    encoder = config.learning_rate or usual
    heads = config.head_learning_rate or max(encoder, 1e-3)
    return [encoder, heads]


def _derived(seed: int, rank: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _text(figures: dict[str, float], epsilon: object) -> str:
    text = f"loss {figures['loss']:.3f}"
    if epsilon is None:
        return text
    clipped, noise = figures["clip_fraction"], figures["noise_multiplier"]
    return f"{text}   clipped {clipped:.0%}   noise {noise:.3g}   ε {epsilon}"
