"""The optimizer under audit: its settings, and one step of it with gradients that the audit chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from edpsgd import FirstStepNorms, PrivateOptimizer
from edpsgd.distributed.collectives import Collective
from edpsgd.mechanism.layer_scales import unit_rms
from edpsgd.schedules import Decay

CLIP_NORM = 0.5  # not 1, so that a forgotten factor shows
SMALL, LARGE = (8, 4, 16), (1200, 600, 2400)  # sizes of the layers, for many steps and for few
_NORMS = (1.0, 2.0, 4.0)  # of the layers of the gradients from which scales are measured
Maker = Callable[..., PrivateOptimizer]


@dataclass(frozen=True)
class Setup:
    """The settings to audit; the names are those of PrivateOptimizer's arguments or close to them.

    Attributes:
        micro_batches: per worker and step.
        epoch: the one to audit; its claim is the multiplier times the decay.
        scaling: "none", "public:A,B,C" for the scales of the three layers, or "private:Z" for FirstStepNorms(Z).

    Example:
        >>> from edpsgd import LinearDecay
        >>> Setup(noise_multiplier=2.0, noise_decay=LinearDecay(0.5), epoch=2).claimed_multiplier
        1.0
    """

    noise_multiplier: float = 1.0
    noise: str = "calibrated"
    micro_batches: int = 1
    clipping: str = "flat"
    noise_placement: str = "sharded"
    noise_decay: Decay | None = None
    epoch: int = 0
    scaling: str = "none"
    unit: str = "micro_batch"
    compression: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ValueError(f"noise_multiplier must be a finite number > 0, got {self.noise_multiplier!r}")
        for name, least in (("micro_batches", 1), ("epoch", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be an int >= {least}, got {getattr(self, name)!r}")
        parse_scaling(self.scaling)

    @property
    def claimed_multiplier(self) -> float:
        """The printed one, decayed to the audited epoch."""
        return self.noise_multiplier * (1.0 if self.noise_decay is None else self.noise_decay(self.epoch))

    @property
    def is_sharded(self) -> bool:
        """Whether each worker noises its own coordinates; the paper's noise never is."""
        return self.noise == "calibrated" and self.noise_placement == "sharded"

    def arguments(self, workers: int) -> dict[str, Any]:
        """For PrivateOptimizer."""
        others = ("micro_batches", "epoch", "scaling")
        return {
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name not in others},
            "clip_norm": CLIP_NORM,
            "layer_scaling": parse_scaling(self.scaling),
            "divisor": float(workers * self.micro_batches) if self.unit == "example" else None,
        }


def parse_scaling(text: str) -> Mapping[str, float] | FirstStepNorms | None:
    """Layer scales from none, public:A,B,C or private:Z.

    Example:
        >>> parse_scaling("public:1,2,4")
        {'p0': 1.0, 'p1': 2.0, 'p2': 4.0}
    """
    if text == "none":
        return None
    kind, _, values = text.partition(":")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    is_good = bool(numbers) and all(math.isfinite(number) and number > 0 for number in numbers)
    if is_good and kind == "private" and len(numbers) == 1:
        return FirstStepNorms(numbers[0])
    if is_good and kind == "public" and len(numbers) == len(SMALL):
        return {f"p{index}": number for index, number in enumerate(numbers)}
    raise ValueError(f"scaling must be none, public:A,B,C or private:Z with numbers > 0, got {text!r}")


# -------------------------------------------------------------------- the optimizer under audit


class Recorder:
    """A collective that keeps what this worker sent in the last message, and what came back."""

    def __init__(self, inner: Collective) -> None:
        self.inner = inner
        self.sent = self.received = torch.empty(0)

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.inner.size

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """The sum of the workers, noted down."""
        self.sent = torch.cat([tensor.flatten() for tensor in tensors]).float()
        self.inner.sum_(tensors)
        self.received = torch.cat([tensor.flatten() for tensor in tensors]).float()

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value."""
        return self.inner.gather(value)


class AuditedOptimizer:
    """An optimizer with three loose parameters, to hand gradients to and to see what becomes of them."""

    def __init__(self, setup: Setup, collective: Collective, make: Maker, sizes: Sequence[int]) -> None:
        model = nn.ParameterDict({f"p{index}": nn.Parameter(torch.zeros(size)) for index, size in enumerate(sizes)})
        self.parameters = list(model.values())
        inner = torch.optim.SGD(self.parameters, lr=1.0)
        self._optimizer = make(inner, list(model.items()), collective=collective, **setup.arguments(collective.size))
        self._setup, self._collective = setup, collective
        self.divisor = collective.size * setup.micro_batches
        self._optimizer.set_epoch(setup.epoch)

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor] | None, is_absent: bool = False) -> list[torch.Tensor]:
        """One step with these gradients in one micro-batch of worker 0 and nothing in all others.

        Args:
            gradients: those of the micro-batch, None for an empty one.
            is_absent: leaves the micro-batch out altogether.

        Returns:
            The noised sum over all micro-batches, as the parameters show it.
        """
        for parameter in self.parameters:
            parameter.zero_()
        is_first = self._collective.rank == 0
        for _ in range(self._setup.micro_batches - 1):
            self._optimizer.accumulate()
        if is_first and gradients is not None:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        if not (is_first and is_absent):
            self._optimizer.accumulate()
        self._optimizer.step()
        return [parameter.detach() * -self.divisor for parameter in self.parameters]

    def scales(self) -> list[float]:
        """Those of the layers at root mean square 1; measured by a first step if need be."""
        given = parse_scaling(self._setup.scaling)
        if given is None:
            return [1.0] * len(self.parameters)
        if isinstance(given, Mapping):
            return unit_rms(list(given.values()))
        self.step(spread(_NORMS, self.parameters))
        return list(self._optimizer.state_dict()["edpsgd"]["scales"].values())


def spread(weights: Sequence[float], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A gradient whose layers have these norms, alike in all coordinates of a layer."""
    return [torch.full_like(p, weight / math.sqrt(p.numel())) for weight, p in zip(weights, parameters, strict=True)]
