"""The privacy settings of an optimizer: checked when they are made, compared between workers, noted in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from edpsgd._arguments import UNITS, check_choice, check_number, check_seed
from edpsgd.mechanism import sensitivity
from edpsgd.mechanism.layer_scales import FirstStepNorms
from edpsgd.schedules import Decay


@dataclass(frozen=True)
class Settings:
    """What the user chose, under the names of PrivateOptimizer's arguments, and what the sampler says of its units.

    Attributes:
        divisor: as given, or the expected number of units that the sampler knows; None for N·K.
        sensitivity_factor: how many clip norms one example or user can move the sum of clipped gradients. The sampler
            knows it; it has no meaning for micro-batches.
    """

    clip_norm: float
    noise_multiplier: float
    noise_decay: Decay | None
    clipping: str
    unit: str
    layer_scaling: Mapping[str, float] | FirstStepNorms | None
    noise: str
    noise_placement: str
    seed: int | None = field(repr=False)
    divisor: float | None
    compression: str | None
    verify: str
    sensitivity_factor: float

    def __post_init__(self) -> None:
        check_number("clip_norm", self.clip_norm, 0.0, strict=True)
        check_number("noise_multiplier", self.noise_multiplier, 0.0, strict=False)
        check_choice("clipping", self.clipping, ("flat", "per_layer"))
        check_choice("unit", self.unit, UNITS)
        check_choice("noise", self.noise, ("calibrated", "paper"))
        check_choice("noise_placement", self.noise_placement, ("sharded", "per_worker"))
        check_choice("verify", self.verify, ("spot", "always"))
        check_choice("compression", self.compression, (None, "fp16", "bf16"))
        if self.noise_decay is not None and not callable(self.noise_decay):
            raise ValueError(f"noise_decay must be None or a callable epoch -> factor, got {self.noise_decay!r}")
        if not isinstance(self.layer_scaling, Mapping | FirstStepNorms | None):
            raise ValueError(
                f"layer_scaling must be None, a mapping name -> scale or FirstStepNorms, got {self.layer_scaling!r}"
            )
        if isinstance(self.layer_scaling, Mapping):  # a copy that nobody else can change
            object.__setattr__(self, "layer_scaling", dict(self.layer_scaling))
        check_seed(self.seed)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.unit != "micro_batch":
            if self.divisor is None:
                raise ValueError(
                    f"unit={self.unit!r} needs divisor: the public, expected number of {self.unit}s in a step over all "
                    "workers"
                )
            check_number("divisor", self.divisor, 0.0, strict=True)
            if self.noise == "paper":
                raise ValueError(f"noise='paper' is defined for unit='micro_batch' only, got unit={self.unit!r}")
        elif self.divisor is not None:
            raise ValueError("divisor is for unit='example'; with unit='micro_batch' it is the number of micro-batches")
        if self.compression and self.noise_placement != "per_worker" and self.noise == "calibrated":
            raise ValueError(
                "compression needs noise_placement='per_worker': a sharded gradient is not noised everywhere yet when "
                "it is rounded"
            )

    @property
    def sensitivity(self) -> float:
        """s, how far one example or user can move the sum of clipped gradients (privacy.md section 2)."""
        return sensitivity.sum_sensitivity(self.unit, self.clip_norm, self.sensitivity_factor)

    @property
    def first_step_norms(self) -> FirstStepNorms:
        """How the layer scales are measured; a TypeError where they are not."""
        if not isinstance(self.layer_scaling, FirstStepNorms):
            raise TypeError("only FirstStepNorms are measured")
        return self.layer_scaling

    def noise_at(self, epoch: int) -> float:
        """The nominal noise multiplier z_t = z·d(t) of an epoch (privacy.md section 4)."""
        if self.noise_decay is None:
            return float(self.noise_multiplier)
        factor = self.noise_decay(epoch)
        check_number(f"noise_decay({epoch})", factor, 0.0, strict=True)
        return float(self.noise_multiplier * factor)

    def noise_per_worker(self, z: float, workers: int, micro_batches: int, scales: list[float]) -> list[float]:
        """The std of the noise that a worker adds to its sum, for each layer (privacy.md sections 3 and 6).

        It is that on the coordinates that the worker noises, which with sharded noise are only some of them.

        Args:
            z: the nominal noise multiplier of the epoch.
            workers: N.
            micro_batches: K.
            scales: α of the layers.
        """
        if self.noise == "paper":
            std = sensitivity.paper_worker_std(self.clip_norm, z, workers, micro_batches)
            return [std] * len(scales)
        shares = 1 if self.noise_placement == "sharded" else workers
        is_isotropic = self.clipping == "per_layer"
        factors = [1.0] * len(scales) if is_isotropic else scales
        return sensitivity.calibrated_worker_stds(self.sensitivity, z, shares, factors)

    def effective_noise(self, z: float, workers: int, micro_batches: int, scales: list[float]) -> float:
        """The multiplier of the Gaussian mechanism that a step really is (privacy.md section 3); arguments as above."""
        if self.noise == "calibrated":
            return z
        largest = 1.0 if self.clipping == "per_layer" else max(scales)
        return sensitivity.paper_multiplier(z, workers, micro_batches, largest)

    @property
    def is_sharded(self) -> bool:
        """Whether each worker noises only its own share of the coordinates; never with the paper's noise."""
        return self.noise == "calibrated" and self.noise_placement == "sharded"

    def describe(self) -> dict[str, Any]:
        """The settings as JSON-ready data, under the names of a run's record."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        del settings["seed"]  # a secret
        del settings["sensitivity_factor"]  # the sensitivity holds it
        return {
            **settings,
            "clip_norm": float(self.clip_norm),
            "noise_multiplier": float(self.noise_multiplier),
            "noise_decay": None if self.noise_decay is None else _name(self.noise_decay),
            "layer_scaling": _plain(self.layer_scaling),
            "noise_placement": "per_worker" if self.noise == "paper" else self.noise_placement,
            "divisor": None if self.divisor is None else float(self.divisor),
            "seeded": self.seed is not None,
            "sensitivity": float(self.sensitivity),
        }


def _plain(scaling: Mapping[str, float] | FirstStepNorms | None) -> Mapping[str, Any] | None:
    """As JSON-ready data."""
    if isinstance(scaling, FirstStepNorms):
        return scaling.describe()
    if scaling is None:
        return None
    return {name: float(scale) for name, scale in scaling.items()}


def _name(decay: Decay) -> str:
    """A description that is the same on every worker: functions print their address, their names do not."""
    return getattr(decay, "__qualname__", None) or repr(decay)
