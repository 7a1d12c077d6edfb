"""The step's sum of clipped gradients, in flat buffers that go over the wire as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from edpsgd import tensors
from edpsgd.mechanism.noise import GaussianStream
from edpsgd.tensors import chunks

_LARGEST_FLOAT16 = 0.99 * torch.finfo(torch.float16).max


@dataclass
class _Buffer:
    """The layers of one device and dtype, end to end."""

    flat: torch.Tensor
    layers: list[int]
    views: list[torch.Tensor]
    offsets: list[int]

    @property
    def gradient(self) -> torch.Tensor:
        """The buffer without what may ride behind the gradient."""
        return self.flat[: self.offsets[-1]]


class GradientSum:
    """One flat buffer per device and dtype, with a view for each layer and a few free elements behind the first.

    Layers of half precision are summed in single: rounding the sum would let one unit move all that the others have
    added by much more than the clip norm.

    Args:
        parameters: the layers.
        tail: how many free elements to keep at the end of the first buffer, for what rides along on the wire.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], tail: int) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, parameter in enumerate(parameters):
            by_kind.setdefault((parameter.device, tensors.precision(parameter)), []).append(index)
        self._buffers = [
            _make_buffer([parameters[i] for i in layers], layers, tail if position == 0 else 0)
            for position, layers in enumerate(by_kind.values())
        ]
        self._is_empty = True
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        for buffer in self._buffers:
            for layer, view in zip(buffer.layers, buffer.views, strict=True):
                self.views[layer] = view

    @property
    def wire(self) -> list[torch.Tensor]:
        """What the workers add up."""
        return [buffer.flat for buffer in self._buffers]

    @property
    def tail(self) -> torch.Tensor:
        """The free elements."""
        return self._buffers[0].flat[self._buffers[0].offsets[-1] :]

    @property
    def home(self) -> torch.device:
        """The device of the first buffer."""
        return self._buffers[0].flat.device

    def clear(self) -> None:
        """Empties the sum; costs nothing, the next gradient overwrites it."""
        self._is_empty = True

    def scale_(self, factor: float) -> None:
        """Multiplies the sum."""
        for buffer in self._buffers if not self._is_empty and factor != 1.0 else ():
            buffer.gradient.mul_(factor)

    def add_(self, gradients: Sequence[torch.Tensor | None], factors: torch.Tensor) -> None:
        """Adds a clipped gradient, overwriting what was passed.

        ``factors`` is one number, or one for each layer; 0 discards the gradient even if it holds NaN.
        """
        for buffer in self._buffers:
            found = [layer for layer in buffer.layers if gradients[layer] is not None]
            dtype = buffer.flat.dtype
            sources = [gradient.to(dtype) for layer in found if (gradient := gradients[layer]) is not None]
            views = [self.views[layer] for layer in found]
            local = tensors.moved(factors, buffer.flat.device)
            if self._is_empty:
                for layer in set(buffer.layers) - set(found):
                    self.views[layer].zero_()
                if tensors.on_cpu(buffer.flat):  # one pass over the memory
                    _copy_scaled(views, sources, _of_layers(local, found))
                elif found:  # few kernels
                    torch._foreach_copy_(views, sources)
                    _scale(views, _of_layers(local, found)) if local.ndim else _scale([buffer.gradient], [local])
            elif found:
                _scale(sources, _of_layers(local, found))
                torch._foreach_add_(views, sources)
        self._is_empty = False

    def open(self) -> list[torch.Tensor]:
        """The sum's part of each layer, for others to add to."""
        for buffer in self._buffers if self._is_empty else ():
            buffer.gradient.zero_()
        self._is_empty = False
        return self.views

    def keep_finite_(self, workers: int) -> None:
        """Bounds every element, so that the sum over the workers is finite in float16."""
        limit = _LARGEST_FLOAT16 / workers
        for buffer in self._buffers:
            buffer.gradient.clamp_(-limit, limit)

    def add_noise_(self, stream: GaussianStream, stds: Sequence[float], shard: int, shards: int) -> None:
        """Adds Gaussian noise of each layer's std to one of equal shards of the coordinates."""
        for buffer in self._buffers:
            if self._is_empty:
                buffer.flat.zero_()
            count = buffer.offsets[-1]
            start, end = count * shard // shards, count * (shard + 1) // shards
            for first, last, std in _runs_of_equal_std(buffer, stds):
                if max(first, start) < min(last, end):
                    stream.add_to(buffer.flat[max(first, start) : min(last, end)], std)
        self._is_empty = False


def float16_factor(stds: Sequence[float], largest: float, workers: int) -> float:
    """A power of two, 1 in most settings, with which noise keeps its law in float16, neither bounded nor rounded away.

    Args:
        stds: of the noise of one worker, for each layer; public numbers.
        largest: what an element of a worker's sum of clipped gradients is expected not to exceed; public.
        workers: whose sum must fit into float16.
    """
    smallest = min(stds)
    if smallest <= 0:  # no noise is promised
        return 1.0
    limit = _LARGEST_FLOAT16 / workers
    reach = largest + 12 * max(stds)
    is_fitting = reach <= limit and smallest >= torch.finfo(torch.float16).tiny
    return 1.0 if is_fitting else 2.0 ** math.floor(math.log2(limit / reach))


def _make_buffer(parameters: Sequence[torch.Tensor], layers: list[int], tail: int) -> _Buffer:
    offsets = [0]
    for parameter in parameters:
        offsets.append(offsets[-1] + parameter.numel())
    flat = torch.zeros(offsets[-1] + tail, dtype=tensors.precision(parameters[0]), device=parameters[0].device)
    views = [flat[start:end].view(p.shape) for p, start, end in zip(parameters, offsets[:-1], offsets[1:], strict=True)]
    return _Buffer(flat, layers, views, offsets)


def _of_layers(factors: torch.Tensor, layers: list[int]) -> list[torch.Tensor]:
    """Each layer's factor; indexing by a list would wait for the device."""
    each = factors.unbind() if factors.ndim else None
    return [factors if each is None else each[layer] for layer in layers]


def _scale(tensors: list[torch.Tensor], factors: list[torch.Tensor]) -> None:
    """Multiplies each tensor by its factor; a factor of 0 gives 0 even where there is NaN."""
    for tensor, factor in zip(tensors, factors, strict=True):
        for part in chunks(tensor.view(-1)) if tensor.is_contiguous() else (tensor,):
            part.mul_(factor).nan_to_num_(0.0, 0.0, 0.0)


def _copy_scaled(targets: list[torch.Tensor], sources: list[torch.Tensor], factors: list[torch.Tensor]) -> None:
    """The same, into other tensors."""
    for target, source, factor in zip(targets, sources, factors, strict=True):
        for to, part in zip(chunks(target.view(-1)), chunks(source.reshape(-1)), strict=True):
            torch.mul(part, factor, out=to).nan_to_num_(0.0, 0.0, 0.0)


def _runs_of_equal_std(buffer: _Buffer, stds: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """Ranges of the buffer that share one std, as few as possible."""
    start = 0
    for position, layer in enumerate(buffer.layers):
        following = buffer.layers[position + 1 : position + 2]
        if not following or stds[following[0]] != stds[layer]:
            yield start, buffer.offsets[position + 1], stds[layer]
            start = buffer.offsets[position + 1]
