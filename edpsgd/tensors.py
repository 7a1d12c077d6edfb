"""What is done to tensors on any device: precision, cache-sized pieces, and the norms of layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

CPU_CHUNK = 1 << 17  # elements that several operations in a row find in the cache
_DEVICE_CHUNK = 1 << 26  # elements elsewhere: few kernels, and not much memory for what is drawn
_PART = 1 << 15  # elements whose squares can be summed in single precision with an error of some millionths
_SAFE = 1e-13  # a norm above this hardly notices what its squares lose below the range of single precision


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, without waiting for it.

    But what comes to the CPU must have arrived before it is read.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def precision(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which sums and noise are computed: single precision, or the tensor's own if that is more."""
    return torch.promote_types(tensor.dtype, torch.float32)


def on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a CPU.

    CPUs have a cache, in which the work shall stay; on other devices as few kernels as possible shall be launched.
    """
    return tensor.device.type == "cpu"


def chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of a vector that several operations in a row can work on: cache-sized on CPUs, large elsewhere."""
    yield from torch.split(flat, CPU_CHUNK if on_cpu(flat) else _DEVICE_CHUNK)


def layer_norms(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """The norm of each layer's gradient, 0 where there is none: (layers,), on the given device.

    It is in single precision, or in the highest of the gradients if that is more. The host waits for no device.
    """
    highest = torch.float32
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(index)
            highest = torch.promote_types(highest, gradient.dtype)
    norms = [torch.zeros((), device=device, dtype=highest)] * len(gradients)
    for (_, dtype), indices in by_kind.items():
        alike = [gradient for index in indices if (gradient := gradients[index]) is not None]
        found = _norms(alike, torch.promote_types(dtype, torch.float32))
        for index, norm in zip(indices, found, strict=True):
            norms[index] = moved(norm.to(highest), device)
    return torch.stack(norms)


def _norms(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each gradient, in the given dtype; they are on one device, and of one dtype.

    Squares may leave the range of single precision where the gradient does not.
    """
    if not _is_at_hand(gradients[0]):
        found = torch._foreach_norm(gradients, 2, dtype=_wide(gradients[0].device))
        return [norm.to(dtype) for norm in found]
    norms = _norms_of_parts(gradients, dtype)
    if dtype is torch.float32:  # double precision is slow on CPUs, so only where it is needed
        unsafe = [index for index, norm in enumerate(norms) if not _SAFE < float(norm) < math.inf]
        again = _norms_of_parts([gradients[index] for index in unsafe], torch.float64)
        for index, norm in zip(unsafe, again, strict=True):
            norms[index] = norm.to(dtype)
    return norms


def _is_at_hand(tensor: torch.Tensor) -> bool:
    """Whether the host can read a value without waiting for a device."""
    return tensor.is_cpu


def _norms_of_parts(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each gradient, in parts: torch's sum of very many squares comes out too small on CPUs."""
    parts_of_each = [torch.split(gradient.reshape(-1), _PART) for gradient in gradients]
    all_parts = list(itertools.chain.from_iterable(parts_of_each))
    if not all_parts:
        return []
    found = iter(torch._foreach_norm(all_parts, 2, dtype=dtype))  # one call for all of them
    norms = []
    for parts in parts_of_each:
        of_parts = list(itertools.islice(found, len(parts)))
        is_whole = len(of_parts) == 1
        norms.append(of_parts[0] if is_whole else torch.linalg.vector_norm(torch.stack(of_parts)))
    return norms


def _wide(device: torch.device) -> torch.dtype:
    """Double precision, in which no square of single precision leaves the range; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def row_lengths(norms: torch.Tensor) -> torch.Tensor:
    """The length of each vector of layer norms, over the last dimension, in double precision."""
    lengths: torch.Tensor = torch.linalg.vector_norm(norms, dim=-1, dtype=_wide(norms.device))
    return lengths


def vector_norm(tensor: torch.Tensor) -> float:
    """The norm of all elements together, in double precision; waits for the device."""
    return float(torch.linalg.vector_norm(tensor, dtype=_wide(tensor.device)))
