"""The first step with FirstStepNorms: what workers sum in it, and the scales that follow.

Sections are those of privacy.md; this is section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from edpsgd.mechanism import layer_scales
from edpsgd.mechanism.layer_scales import FirstStepNorms
from edpsgd.mechanism.noise import GaussianStream


class ScaleMeasurement:
    """One message with a noised sum of layer norms. It updates nothing, and releases no gradient.

    Args:
        settings: whether there is noise, and how much.
        layers: how many there are.
        trailer_size: how many elements the message has behind the norms.
        device: where it is.

    Attributes:
        message: what the workers add up, a vector in single precision.
        noise_multiplier: z of the measurement, 0 without noise.
    """

    def __init__(self, settings: FirstStepNorms, layers: int, trailer_size: int, device: torch.device) -> None:
        self.noise_multiplier = settings.noise_multiplier or 0.0
        self.message = torch.zeros(layers + trailer_size, dtype=torch.float32, device=device)
        self._settings = settings
        self._norms = self.message[:layers]

    @property
    def trailer(self) -> torch.Tensor:
        """The part of the message behind the norms."""
        return self.message[len(self._norms) :]

    def add_norms(self, norms: torch.Tensor) -> None:
        """Adds what this worker's units tell of their layer norms, (layers,)."""
        self._norms += norms

    def add_noise_(self, stream: GaussianStream, workers: int) -> None:
        """Adds this worker's share of the noise; the variances of all shares add up."""
        stream.add_to(self._norms, self._settings.noise_std / math.sqrt(workers))

    def scales(self, names: Sequence[str]) -> dict[str, float]:
        """The scale of each layer by its name, once the message holds the sum over the workers."""
        measured = layer_scales.measured_scales(self._norms.tolist())
        return dict(zip(names, measured, strict=True))
