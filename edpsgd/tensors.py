"""What is done to tensors on any device: precision, cache-sized pieces, and the norms of layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

CPU_CHUNK = 1 << 17  # elements that several operations in a row find in the cache
_PART = 1 << 15  # elements whose squares can be summed in single precision with an error of some millionths
_SAFE = 1e-13  # a norm above this hardly notices what its squares lose below the range of single precision


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On another device, without waiting for it; but what comes to the CPU must have arrived before it is read."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def precision(tensor: torch.Tensor) -> torch.dtype:
    """In which sums and noise are computed: single, or what the tensor has if that is more."""
    return torch.promote_types(tensor.dtype, torch.float32)


def on_cpu(tensor: torch.Tensor) -> bool:
    """CPUs have a cache to stay in, other devices kernels to launch as few of as possible."""
    return tensor.device.type == "cpu"


def chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces that several operations in a row can work on: cache-sized on CPUs, large elsewhere."""
    yield from torch.split(flat, CPU_CHUNK if on_cpu(flat) else 1 << 26)


def layer_norms(gradients: Sequence[torch.Tensor | None], home: torch.device) -> torch.Tensor:
    """The norm of each layer's gradient, 0 where there is none; on one device, without a host sync."""
    precision = torch.float32
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(index)
            precision = torch.promote_types(precision, gradient.dtype)
    norms = [torch.zeros((), device=home, dtype=precision)] * len(gradients)
    for (_, dtype), indices in by_kind.items():
        kind = [g for i in indices if (g := gradients[i]) is not None]
        for index, norm in zip(indices, _norms(kind, torch.promote_types(dtype, torch.float32)), strict=True):
            norms[index] = moved(norm.to(precision), home)
    return torch.stack(norms)


def _norms(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """One for each gradient. Squares may leave the range of single precision, where the gradient does not."""
    if not _is_at_hand(gradients[0]):
        found = torch._foreach_norm(gradients, 2, dtype=_wide(gradients[0].device))
        return [norm.to(dtype) for norm in found]
    norms = _norms_of_parts(gradients, dtype)
    if dtype is torch.float32:  # double precision is slow on CPUs, so only where it is needed
        left = [i for i, norm in enumerate(norms) if not _SAFE < float(norm) < math.inf]
        again = _norms_of_parts([gradients[i] for i in left], torch.float64)
        for i, norm in zip(left, again, strict=True):
            norms[i] = norm.to(dtype)
    return norms


def _is_at_hand(tensor: torch.Tensor) -> bool:
    """Whether the host can read a value without waiting for a device."""
    return tensor.is_cpu


def _norms_of_parts(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """In parts, as torch's sum of very many squares comes out too small on CPUs."""
    parts = [torch.split(gradient.reshape(-1), _PART) for gradient in gradients]
    pieces = [part for one in parts for part in one]
    found = iter(torch._foreach_norm(pieces, 2, dtype=dtype) if pieces else ())
    of_parts = [list(itertools.islice(found, len(one))) for one in parts]
    return [one[0] if len(one) == 1 else torch.linalg.vector_norm(torch.stack(one)) for one in of_parts]


def _wide(device: torch.device) -> torch.dtype:
    """Double precision, in which no square of single precision leaves the range; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def row_lengths(norms: torch.Tensor) -> torch.Tensor:
    """Of the vectors of layer norms, in double precision."""
    lengths: torch.Tensor = torch.linalg.vector_norm(norms, dim=-1, dtype=_wide(norms.device))
    return lengths


def vector_norm(tensor: torch.Tensor) -> float:
    """Of all elements together, in double precision; waits for the device."""
    return float(torch.linalg.vector_norm(tensor, dtype=_wide(tensor.device)))
