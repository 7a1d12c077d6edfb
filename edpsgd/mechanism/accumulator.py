"""What a worker puts into a step: clipped units, one after the other or many at once, and what is to be known of them.

Section numbers are those of privacy.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.profiler import record_function

from edpsgd import tensors
from edpsgd.mechanism import clipping, layer_scales, sensitivity
from edpsgd.mechanism.buffers import float16_factor
from edpsgd.mechanism.clipping import ClipCounter
from edpsgd.mechanism.layer_scales import FirstStepNorms
from edpsgd.mechanism.noise import GaussianStream
from edpsgd.mechanism.parameters import Layers
from edpsgd.mechanism.settings import Settings
from edpsgd.per_example import UnitGradients


class Contributions:
    """The units of a step so far.

    Args:
        layers: whose sum they go into, which begins empty.
        settings: how they are clipped.
        clips: counts those that were clipped, over the steps of an epoch.
        workers: how many put their contributions together.

    Attributes:
        closed: how many there are, empty ones too.
        discarded: how many of them held NaN or infinities, on the device.
        norms: of the layers, summed over the units, while scales are measured (section 5).
    """

    def __init__(self, layers: Layers, settings: Settings, clips: ClipCounter, workers: int) -> None:
        self._layers, self._settings, self._clips, self._workers = layers, settings, clips, workers
        home = layers.sum.home
        self.closed = 0
        self.discarded = torch.zeros((), dtype=torch.int64, device=home)
        self.norms = torch.zeros(len(layers), dtype=torch.float32, device=home)
        layers.sum.clear()

    def add(
        self,
        gradients: Sequence[torch.Tensor | None],
        loss_scale: torch.Tensor | None,
        is_last: bool = False,
        was_clipped: torch.Tensor | None = None,
    ) -> None:
        """Clips a unit's gradient and adds it to the sum, which may overwrite it; without gradients, an empty unit.

        Args:
            gradients: of the layers.
            loss_scale: what the loss was multiplied by, if not by 1.
            is_last: of the step: then the whole sum is divided too.
            was_clipped: whether it was clipped before it came, if it was made within the ball.
        """
        self.closed += 1
        weight = 1.0 / self.divisor if is_last else 1.0
        self._layers.sum.scale_(weight)
        if all(gradient is None for gradient in gradients):
            return
        with record_function("edpsgd.norms"):
            norms = tensors.layer_norms(gradients, self._layers.sum.home)
        factor: float | torch.Tensor = weight
        if loss_scale is not None:
            norms, factor = norms / loss_scale.to(norms), weight / loss_scale.to(norms)
        finite = clipping.is_finite(norms)
        self.discarded = self.discarded + ~finite
        if self._layers.scales is None:
            self._add_norms(norms, finite)
        else:
            factors = clip_factors(norms, self._settings, self._layers)
            if was_clipped is None:
                self._clips.add(factors, finite)
            else:
                self._clips.add_known(was_clipped, finite)
            with record_function("edpsgd.clip"):
                self._layers.sum.add_(gradients, torch.where(finite, factors * factor, 0.0))

    def add_empty(self, count: int) -> None:
        """Closes the last units of a step, of which there are no gradients, and divides the whole sum."""
        self.closed += count
        self._layers.sum.scale_(1.0 / self.divisor)

    @property
    def divisor(self) -> float:
        """A public number: never a count of examples, or of workers that happened to have data."""
        return sensitivity.public_divisor(self._settings.divisor, self._workers, self.closed)

    # ---------------------------------------------------------------- noise

    def noise_stds(self, noise_multiplier: float) -> list[float]:
        """Of a worker's share of the noise on the mean, for each layer."""
        scales = self._layers.scales or []
        stds = self._settings.noise_per_worker(noise_multiplier, self._workers, self.closed, scales)
        return [std / self.divisor for std in stds]

    def add_noise_(self, stream: GaussianStream, noise_multiplier: float, rank: int) -> None:
        """Adds this worker's share of the noise to the sum."""
        shard, shards = (rank, self._workers) if self._settings.is_sharded else (0, 1)
        with record_function("edpsgd.noise"):
            self._layers.sum.add_noise_(stream, self.noise_stds(noise_multiplier), shard, shards)

    def fit_float16_(self, noise_multiplier: float) -> float:
        """Multiplies the noised sum by a public factor, and bounds it, so that it fits into float16; the factor."""
        largest = 2 * self._settings.clip_norm * max(self._layers.scales or [1.0])  # room for uneven shares of a step
        factor = float16_factor(self.noise_stds(noise_multiplier), largest, self._workers)
        self._layers.sum.scale_(factor)
        self._layers.sum.keep_finite_(self._workers)
        return factor

    # ---------------------------------------------------------------- many units at once

    def add_units(
        self,
        engine: UnitGradients,
        losses: torch.Tensor,
        units: torch.Tensor | None,
        count: int | None,
        loss_scale: torch.Tensor | None,
    ) -> None:
        """Clips many units in one backward pass, and adds them to the sum.

        Args:
            engine: finds their norms, and their weighted sum.
            losses: of the examples.
            units: the number of each example's unit; None if each is its own.
            count: how many units there are; some may be empty.
            loss_scale: what the losses were multiplied by, if not by 1.
        """
        with record_function("edpsgd.backward"):
            norms = engine.backward(losses, units, count).detach().to(self._layers.sum.home, torch.float32)
        scale = 1.0 if loss_scale is None else loss_scale.to(norms)
        norms, finite = norms / scale, torch.isfinite(norms.sum(dim=1))
        self.closed += len(norms)
        self.discarded = self.discarded + (~finite).sum()
        if self._layers.scales is None:
            self._add_norms(norms, finite.unsqueeze(1))
        else:
            factors = clip_factors(norms, self._settings, self._layers)
            self._clips.add(factors, finite & (norms.sum(dim=1) != 0))
            kept = finite if factors.dim() == 1 else finite.unsqueeze(1)
            with record_function("edpsgd.weighted_sum"):
                engine.add_weighted_(self._layers.sum.open(), torch.where(kept, factors / scale, 0.0))
        engine.release()

    def _add_norms(self, norms: torch.Tensor, finite: torch.Tensor) -> None:
        scaling = self._settings.layer_scaling
        is_private = isinstance(scaling, FirstStepNorms) and scaling.noise_std > 0
        contribution = layer_scales.norm_contribution(norms, private=is_private)
        self.norms = self.norms + torch.where(finite, contribution, 0.0).float().reshape(-1, len(self.norms)).sum(dim=0)


def clip_factors(norms: torch.Tensor, settings: Settings, layers: Layers) -> torch.Tensor:
    """What a unit's gradient is multiplied by: one number, or one for each layer."""
    clip = clipping.per_layer_factors if settings.clipping == "per_layer" else clipping.flat_factor
    return clip(norms, settings.clip_norm, layers.scale_tensor)


def claim_losses(losses: torch.Tensor, owner: object) -> None:
    """Refuses losses that went through backward() before: what they tell of their examples would be released twice."""
    if losses.grad_fn is None:
        return
    claims: dict[str, int] = losses.grad_fn.metadata  # type: ignore[assignment]  # lives as long as the graph
    key = _claim(losses)
    if key not in claims:
        claims[key] = id(owner)
        return
    if claims[key] == id(owner):
        raise RuntimeError(
            "these losses went through backward() before: every example would count twice. Compute them again"
        )
    raise RuntimeError(
        "these losses went through backward() of another PrivateOptimizer: every example would be released by both, "
        "and neither ledger counts what the other releases. Give all parameters to one PrivateOptimizer, in several "
        "groups if they need different learning rates"
    )


def release_losses(losses: torch.Tensor) -> None:
    """Takes the claim back, if nothing came of it."""
    if losses.grad_fn is not None:
        losses.grad_fn.metadata.pop(_claim(losses), None)  # type: ignore[attr-defined]


def _claim(losses: torch.Tensor) -> str:
    """A node can have several outputs, such as the parts of a split."""
    return f"edpsgd.backward {losses.output_nr}"


def check_one_for_each(losses: object) -> None:
    """Refuses losses that are no vector."""
    if not isinstance(losses, torch.Tensor) or losses.dim() != 1:
        shape = getattr(losses, "shape", None)
        found = f"a {type(losses).__name__}" if shape is None else f"shape {tuple(shape)}"
        raise ValueError(f"losses must be one number for each example, a tensor of shape (B,), got {found}")


OPEN_EXAMPLE = (
    "step() found a gradient that was not closed as that of one example, and the mean over a batch is none: with "
    "unit='example' call optimizer.backward(losses) with one loss for each example, or optimizer.accumulate() after "
    "the backward of each"
)
