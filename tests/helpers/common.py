"""Small models, a spy on the wire, and the algorithm written a second time from privacy.md."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from scipy.stats import chi2, norm
from torch import nn

import edpsgd
from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.launchers import resolve
from tasks.common.workers import has_bf16

SIGNIFICANCE = 0.001  # with a seed, where a test gives the same answer every time
FRESH = 1e-10  # with fresh entropy: repeated noise has a correlation of 1 all the same
needs_bf16 = pytest.mark.skipif(
    not has_bf16(torch.device("cpu")), reason="this processor has no bf16: torch runs no LSTM in it"
)


class Bag(nn.Module):
    """Three loose parameters of different sizes, to hand gradients to."""

    def __init__(self, sizes: Sequence[int] = (3000, 1500, 6000)) -> None:
        super().__init__()
        for index, size in enumerate(sizes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(size)))


def set_gradients(model: nn.Module, value: float = 0.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def private(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any):
    """A PrivateOptimizer with the usual settings, around SGD with a rate of 1."""
    settings = {"clip_norm": 1.0, "noise_multiplier": 1.0, **settings}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return edpsgd.PrivateOptimizer(optimizer, model.named_parameters(), **settings)


class Spy:
    """A collective that keeps what each worker put on the wire."""

    def __init__(self) -> None:
        self.inner: Collective = resolve("auto")
        self.sent: list[torch.Tensor] = []
        self.messages = 0

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        self.messages += 1
        self.sent.append(torch.cat([t.flatten() for t in tensors]).clone())
        self.inner.sum_(tensors)

    def gather(self, value: Any) -> list[Any]:
        return self.inner.gather(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Spy:
        return self


def layers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(model: nn.Module, other: Mapping[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), other[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_std(noise: torch.Tensor, std: float, significance: float = SIGNIFICANCE) -> None:
    """A chi-square test of the variance, and one of the mean."""
    noise = noise.double()
    statistic = float((noise / std).square().sum())
    low, high = chi2.ppf([significance / 2, 1 - significance / 2], noise.numel())
    assert low < statistic < high, f"std {noise.std():.5g}, expected {std:.5g}"
    assert abs(float(noise.mean())) < norm.isf(significance / 2) * std / math.sqrt(noise.numel())


def assert_uncorrelated(a: torch.Tensor, b: torch.Tensor, significance: float = SIGNIFICANCE) -> None:
    r = float(torch.corrcoef(torch.stack([a, b]).double())[0, 1])
    assert abs(r) < norm.isf(significance / 2) / math.sqrt(a.numel()), f"correlation {r:.4f}"


def reference_mean(
    micro_batches: Sequence[Mapping[str, torch.Tensor]],
    clip_norm: float,
    per_layer: bool,
    scales: Mapping[str, float] | None,
) -> dict[str, torch.Tensor]:
    """Algorithm 1 without noise, word for word: scale, clip, rescale, average."""
    names = list(micro_batches[0])
    given = scales or dict.fromkeys(names, 1.0)
    rms = math.sqrt(sum(given[n] ** 2 for n in names) / len(names))
    alpha = {n: given[n] / rms for n in names}
    total = {n: torch.zeros_like(micro_batches[0][n]) for n in names}
    for gradient in micro_batches:
        scaled = {n: g / alpha[n] for n, g in gradient.items()}
        whole = math.sqrt(sum(float(g.double().square().sum()) for g in scaled.values()))
        length = math.sqrt(sum(a * a for a in alpha.values()))
        for n in names:
            limit = clip_norm * alpha[n] / length / float(gradient[n].norm()) if per_layer else clip_norm / whole
            total[n] += scaled[n] * min(1.0, limit) * alpha[n]
    return {n: t / len(micro_batches) for n, t in total.items()}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
