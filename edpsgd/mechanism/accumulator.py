"""What a worker puts into a step: the clipped gradients of its units, added up as they come.

Sections are those of privacy.md.
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


class StepAccumulator:
    """The units of a step so far.

    Args:
        layers: whose sum they go into; ``start`` empties it.
        settings: how they are clipped.
        clips: counts those that were clipped, over the steps of an epoch.
        workers: how many put their sums together.

    Attributes:
        layers: as given.
        settings: as given.
        closed: how many units there are, empty ones too.
        discarded: how many of them held NaN or infinities, an integer on the device.
        norms: what they tell of their layer norms while scales are measured, (layers,) (section 5).
    """

    def __init__(self, layers: Layers, settings: Settings, clips: ClipCounter, workers: int) -> None:
        self.layers = layers
        self.settings = settings
        self._clips = clips
        self._workers = workers
        device = layers.sum.first_device
        self.closed = 0
        self.discarded = torch.zeros((), dtype=torch.int64, device=device)
        self.norms = torch.zeros(len(layers), dtype=torch.float32, device=device)

    def start(self) -> StepAccumulator:
        """Begins the step with an empty sum; returns the accumulator."""
        self.layers.sum.clear()
        return self

    @property
    def divisor(self) -> float:
        """What the sum over the workers is divided by: a public number (``public_divisor``).

        With single examples the settings hold it, and the number of closed units does not matter.
        """
        return sensitivity.public_divisor(self.settings.divisor, self._workers, self.closed)

    # ---------------------------------------------------------------- one unit after the other

    def add_gradient(
        self,
        gradients: Sequence[torch.Tensor | None],
        loss_scale: torch.Tensor | None,
        is_last: bool = False,
        was_clipped: torch.Tensor | None = None,
    ) -> None:
        """Clips a unit's gradient and adds it to the sum; without gradients, the unit is empty.

        Args:
            gradients: of the layers; they may be overwritten.
            loss_scale: what the loss was multiplied by, if not by 1.
            is_last: of the step: then the whole sum is divided too.
            was_clipped: whether it was clipped before it came, if it was made within the ball.
        """
        self.closed += 1
        # The sum is divided here, before it gets its noise. The divisor depends on the number of units, which is known
        # with the last one.
        weight = 1.0 / self.divisor if is_last else 1.0
        self.layers.sum.scale_(weight)
        if all(gradient is None for gradient in gradients):
            return
        with record_function("edpsgd.norms"):
            norms = tensors.layer_norms(gradients, self.layers.sum.first_device)
        rescaling: float | torch.Tensor = weight
        if loss_scale is not None:
            norms = norms / loss_scale.to(norms)
            rescaling = weight / loss_scale.to(norms)
        finite = clipping.is_finite(norms)
        self.discarded = self.discarded + ~finite
        if self.layers.scales is None:
            self._add_norms(norms, finite)
            return
        factors = self._clip_factors(norms)
        if was_clipped is None:
            self._clips.add(factors, finite)
        else:
            self._clips.add_known(was_clipped, finite)
        with record_function("edpsgd.clip"):
            self.layers.sum.add_(gradients, torch.where(finite, factors * rescaling, 0.0))

    def close_empty(self, count: int) -> None:
        """Closes so many empty units, the last of the step, and divides the whole sum."""
        self.closed += count
        self.layers.sum.scale_(1.0 / self.divisor)

    # ---------------------------------------------------------------- many units at once

    def add_losses(
        self,
        engine: UnitGradients,
        losses: torch.Tensor,
        units: torch.Tensor | None,
        count: int | None,
        loss_scale: torch.Tensor | None,
    ) -> None:
        """Clips many units in one backward pass, and adds them to the sum.

        Args:
            engine: finds the norms of their gradients, and the weighted sum of these.
            losses: of the examples, (B,).
            units: the number of each example's unit, (B,); None if each is its own.
            count: how many units there are, of which some may be empty; None if only ``units`` says it.
            loss_scale: what the losses were multiplied by, if not by 1.
        """
        with record_function("edpsgd.backward"):
            found = engine.backward(losses, units, count).detach()
            norms = found.to(self.layers.sum.first_device, torch.float32)
        scale = 1.0 if loss_scale is None else loss_scale.to(norms)
        norms = norms / scale
        total = norms.sum(dim=1)
        finite = torch.isfinite(total)
        self.closed += len(norms)
        self.discarded = self.discarded + (~finite).sum()
        if self.layers.scales is None:
            self._add_norms(norms, finite.unsqueeze(1))
        else:
            factors = self._clip_factors(norms)
            has_gradient = total != 0  # empty units are not among those that could be clipped
            self._clips.add(factors, finite & has_gradient)
            kept = finite if factors.dim() == 1 else finite.unsqueeze(1)
            with record_function("edpsgd.weighted_sum"):
                engine.add_weighted_(self.layers.sum.open(), torch.where(kept, factors / scale, 0.0))
        engine.release()

    # ---------------------------------------------------------------- noise

    def noise_stds(self, noise_multiplier: float) -> list[float]:
        """The std of this worker's share of the noise on the mean, for each layer (section 3)."""
        scales = self.layers.scales or []
        stds = self.settings.noise_per_worker(noise_multiplier, self._workers, self.closed, scales)
        return [std / self.divisor for std in stds]

    def add_noise_(self, stream: GaussianStream, noise_multiplier: float, rank: int) -> None:
        """Adds this worker's share of the noise to the sum, which is divided already."""
        shard, shards = (rank, self._workers) if self.settings.is_sharded else (0, 1)
        with record_function("edpsgd.noise"):
            self.layers.sum.add_noise_(stream, self.noise_stds(noise_multiplier), shard, shards)

    def fit_float16_(self, noise_multiplier: float) -> float:
        """Multiplies the noised sum by a public factor, and bounds it, so that it fits into float16.

        Returns:
            The factor, by which the sum over the workers is to be divided.
        """
        largest_scale = max(self.layers.scales or [1.0])
        largest = 2 * self.settings.clip_norm * largest_scale  # room for uneven shares of a step
        factor = float16_factor(self.noise_stds(noise_multiplier), largest, self._workers)
        self.layers.sum.scale_(factor)
        self.layers.sum.keep_finite_(self._workers)
        return factor

    # ---------------------------------------------------------------- details

    def _clip_factors(self, norms: torch.Tensor) -> torch.Tensor:
        """What gradients with these layer norms are multiplied by: one number, or one for each layer."""
        is_per_layer = self.settings.clipping == "per_layer"
        clip = clipping.per_layer_factors if is_per_layer else clipping.flat_factor
        return clip(norms, self.settings.clip_norm, self.layers.scale_tensor)

    def _add_norms(self, norms: torch.Tensor, finite: torch.Tensor) -> None:
        """What one unit, or many, tell of their layer norms while scales are measured (section 5)."""
        scaling = self.settings.layer_scaling
        is_private = isinstance(scaling, FirstStepNorms) and scaling.noise_std > 0
        contribution = layer_scales.norm_contribution(norms, private=is_private)
        kept = torch.where(finite, contribution, 0.0).float()
        self.norms = self.norms + kept.reshape(-1, len(self.norms)).sum(dim=0)
