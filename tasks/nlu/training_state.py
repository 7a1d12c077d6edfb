"""Where a training stands, and the checkpoints that keep it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import edpsgd
from edpsgd import files
from edpsgd.sampling.base import Batches
from models.heads import IntentSlotModel
from tasks.common import checkpoints
from tasks.common.workers import Workers


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


class Diverged(ValueError):
    """The model of a training holds NaN or infinities."""


class TrainingCheckpoints:
    """The checkpoints of a run folder: the last one, and the weights of the best epoch.

    They hold the tensors that are trained. The others are in the run folder's weights from the
    beginning.

    Args:
        folder: the run folder.
        workers: who takes part; worker 0 writes.
        model: whose tensors are kept.
        optimizer: whose state is kept; that of a private one holds the place in the data too.
        batches: the sampler, which plain training keeps beside the optimizer.
    """

    def __init__(
        self,
        folder: Path,
        workers: Workers,
        model: IntentSlotModel,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
    ) -> None:
        self.folder = folder / "checkpoints"
        self._run_folder, self._workers = folder, workers
        self._model, self._optimizer, self._batches = model, optimizer, batches

    def save(self, state: State) -> None:
        """Writes a checkpoint on worker 0; an error there, such as a full disk, is one on all."""
        self.check_weights(state.step)
        optimizer = self._optimizer.state_dict()
        content = {"training": asdict(state), "batches": self._batches.state_dict()}

        def write() -> None:
            checkpoints.save(self.folder, state.step, self._trained(), optimizer, content)
            self._remove_older_best(state.best_epoch)

        self._workers.on_first(write)

    def load(self) -> State | None:
        """Puts the last checkpoint back on every worker.

        Returns:
            The state that it holds; None if there is no checkpoint, and nothing has changed then.
        """
        is_found = checkpoints.latest(self.folder) is not None
        if not self._workers.collective.gather(is_found)[0]:  # worker 0 decides for all
            return None
        return self._workers.together(self._load)

    def _load(self) -> State:
        weights, optimizer, content = checkpoints.load(self.folder)
        self._put(weights)
        state = State(**content["training"])
        self._optimizer.load_state_dict(optimizer)
        if not isinstance(self._optimizer, edpsgd.PrivateOptimizer):
            self._batches.load_state_dict(content["batches"])
        return state

    def check_weights(self, step: int) -> None:
        """Refuses NaN and infinities; all workers hold the same, so that all raise the error."""
        norms = torch._foreach_norm(list(self._trained().values()))
        if not bool(torch.isfinite(torch.stack(norms)).all()):
            raise Diverged(
                f"after step {step} the model holds NaN or infinities: "
                "choose a smaller learning_rate, or a larger warmup. Checkpoints are from before"
            )

    # ---------------------------------------------------------------- the best epoch

    def save_best(self, epoch: int) -> None:
        """Writes the weights of the best epoch so far, on worker 0."""
        self._workers.on_first(lambda: self._write_best(epoch))

    def _write_best(self, epoch: int) -> None:
        path = self._best_path(epoch)
        files.make_private(path.parent)
        checkpoints.save_weights(path, self._trained())

    def restore_best(self, epoch: int) -> None:
        """Puts the weights of the best epoch back into the model of every worker."""
        path = self._best_path(epoch)
        self._workers.on_first(lambda: self._put(checkpoints.load_weights(path)))
        self._workers.broadcast(self._model)

    def _best_path(self, epoch: int) -> Path:
        """A file for each epoch: that of the last checkpoint stays until there is a newer one."""
        return self.folder / f"best-{epoch:06d}.safetensors"

    def _remove_older_best(self, best_epoch: int) -> None:
        for path in self.folder.glob("best-*"):
            if path != self._best_path(best_epoch):
                path.unlink()

    # ---------------------------------------------------------------- trained tensors

    def _trained(self) -> dict[str, torch.Tensor]:
        """The tensors that change, by their names."""
        names = {name for name, p in self._model.named_parameters() if p.requires_grad}
        tensors = self._model.state_dict()
        return {name: tensor for name, tensor in tensors.items() if name in names}

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        """Puts all trained tensors, and nothing else, back into the model."""
        if weights.keys() != self._trained().keys():
            folder = self._run_folder
            raise ValueError(f"the checkpoints in {folder} are of another model: they hold other tensors")
        self._model.load_state_dict(weights, strict=False)
