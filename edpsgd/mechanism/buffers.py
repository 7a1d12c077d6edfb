"""The step's sum of clipped gradients, in flat buffers that are sent as they are."""

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
    """The layers of one device and dtype, end to end.

    Attributes:
        flat: their elements, and behind them a trailer.
        layers: their numbers.
        views: a view of ``flat`` for each of them, of its parameter's shape.
        offsets: where each of them begins in ``flat``, and where the last one ends.
    """

    flat: torch.Tensor
    layers: list[int]
    views: list[torch.Tensor]
    offsets: list[int]

    @property
    def gradient(self) -> torch.Tensor:
        """The buffer without the trailer."""
        return self.flat[: self.offsets[-1]]


class GradientSum:
    """One flat buffer per device and dtype, with a view for each layer and a trailer behind the first.

    Layers of half precision are summed in single: rounding the sum would let one unit move all that the others have
    added by much more than the clip norm.

    Args:
        parameters: the layers.
        trailer_size: how many free elements to keep at the end of the first buffer, for what is sent with the sum.

    Attributes:
        views: the sum's part of each layer, of its parameter's shape.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], trailer_size: int) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, parameter in enumerate(parameters):
            kind = (parameter.device, tensors.precision(parameter))
            by_kind.setdefault(kind, []).append(index)
        self._buffers: list[_Buffer] = []
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        for layers in by_kind.values():
            is_first = not self._buffers
            members = [parameters[layer] for layer in layers]
            buffer = _make_buffer(members, layers, trailer_size if is_first else 0)
            self._buffers.append(buffer)
            for layer, view in zip(layers, buffer.views, strict=True):
                self.views[layer] = view
        self._is_empty = True

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers, which the workers add up."""
        return [buffer.flat for buffer in self._buffers]

    @property
    def trailer(self) -> torch.Tensor:
        """The free elements behind the first buffer."""
        first = self._buffers[0]
        return first.flat[first.offsets[-1] :]

    @property
    def first_device(self) -> torch.device:
        """The device of the first buffer, where all that belongs to the whole step is kept."""
        return self._buffers[0].flat.device

    def clear(self) -> None:
        """Empties the sum; costs nothing, the next gradient overwrites it."""
        self._is_empty = True

    def scale_(self, factor: float) -> None:
        """Multiplies the sum."""
        if self._is_empty or factor == 1.0:
            return
        for buffer in self._buffers:
            buffer.gradient.mul_(factor)

    def add_(self, gradients: Sequence[torch.Tensor | None], factors: torch.Tensor) -> None:
        """Adds a clipped gradient, and may overwrite what was passed.

        Args:
            gradients: of the layers; None where there is none.
            factors: what they are multiplied by, a scalar, or one for each layer; 0 discards a gradient even if it
                holds NaN.
        """
        for buffer in self._buffers:
            found: list[int] = []
            sources: list[torch.Tensor] = []
            for layer in buffer.layers:
                gradient = gradients[layer]
                if gradient is not None:
                    found.append(layer)
                    sources.append(gradient.to(buffer.flat.dtype))
            own_factors = tensors.moved(factors, buffer.flat.device)
            if self._is_empty:
                self._overwrite(buffer, found, sources, own_factors)
            elif found:
                _scale(sources, _of_layers(own_factors, found))
                torch._foreach_add_([self.views[layer] for layer in found], sources)
        self._is_empty = False

    def _overwrite(self, buffer: _Buffer, found: list[int], sources: list[torch.Tensor], factors: torch.Tensor) -> None:
        """Begins a buffer with its first gradient, of which the layers ``found`` have a part."""
        for layer in set(buffer.layers) - set(found):
            self.views[layer].zero_()
        views = [self.views[layer] for layer in found]
        if tensors.on_cpu(buffer.flat):  # one pass over the memory
            _copy_scaled(views, sources, _of_layers(factors, found))
        elif found:  # few kernels
            torch._foreach_copy_(views, sources)
            if factors.ndim:
                _scale(views, _of_layers(factors, found))
            else:
                _scale([buffer.gradient], [factors])

    def open(self) -> list[torch.Tensor]:
        """The sum's part of each layer, for others to add to."""
        if self._is_empty:
            for buffer in self._buffers:
                buffer.gradient.zero_()
        self._is_empty = False
        return self.views

    def keep_finite_(self, workers: int) -> None:
        """Bounds every element, so that the sum over the workers is finite in float16."""
        limit = _LARGEST_FLOAT16 / workers
        for buffer in self._buffers:
            buffer.gradient.clamp_(-limit, limit)

    def add_noise_(self, stream: GaussianStream, stds: Sequence[float], shard: int, shards: int) -> None:
        """Adds Gaussian noise of each layer's std to one of equal shards of each buffer's coordinates."""
        for buffer in self._buffers:
            if self._is_empty:
                buffer.flat.zero_()
            count = buffer.offsets[-1]
            shard_start = count * shard // shards
            shard_end = count * (shard + 1) // shards
            for run_start, run_end, std in _runs_of_equal_std(buffer, stds):
                start, end = max(run_start, shard_start), min(run_end, shard_end)
                if start < end:
                    stream.add_to(buffer.flat[start:end], std)
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
    largest_noised = largest + 12 * max(stds)
    is_fitting = largest_noised <= limit and smallest >= torch.finfo(torch.float16).tiny
    return 1.0 if is_fitting else 2.0 ** math.floor(math.log2(limit / largest_noised))


def _make_buffer(parameters: Sequence[torch.Tensor], layers: list[int], trailer_size: int) -> _Buffer:
    """A buffer of zeros for layers of one device and dtype."""
    offsets = [0]
    for parameter in parameters:
        offsets.append(offsets[-1] + parameter.numel())
    dtype, device = tensors.precision(parameters[0]), parameters[0].device
    flat = torch.zeros(offsets[-1] + trailer_size, dtype=dtype, device=device)
    views = []
    for parameter, start in zip(parameters, offsets[:-1], strict=True):
        views.append(flat[start : start + parameter.numel()].view(parameter.shape))
    return _Buffer(flat, layers, views, offsets)


def _of_layers(factors: torch.Tensor, layers: list[int]) -> list[torch.Tensor]:
    """Each layer's factor; indexing by a list would wait for the device."""
    if factors.ndim == 0:
        return [factors] * len(layers)
    each = factors.unbind()
    return [each[layer] for layer in layers]


def _scale(targets: list[torch.Tensor], factors: list[torch.Tensor]) -> None:
    """Multiplies each tensor by its factor; a factor of 0 gives 0 even where there is NaN."""
    for target, factor in zip(targets, factors, strict=True):
        parts = chunks(target.view(-1)) if target.is_contiguous() else (target,)
        for part in parts:
            part.mul_(factor).nan_to_num_(0.0, 0.0, 0.0)


def _copy_scaled(targets: list[torch.Tensor], sources: list[torch.Tensor], factors: list[torch.Tensor]) -> None:
    """Writes each source times its factor into its target; 0 where the factor is 0, even for NaN."""
    for target, source, factor in zip(targets, sources, factors, strict=True):
        pairs = zip(chunks(target.view(-1)), chunks(source.reshape(-1)), strict=True)
        for target_part, source_part in pairs:
            torch.mul(source_part, factor, out=target_part).nan_to_num_(0.0, 0.0, 0.0)


def _runs_of_equal_std(buffer: _Buffer, stds: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """Ranges of the buffer that share one std, as few as possible: start, end and std.

    Numbers are drawn for a whole range at once, so the ranges are part of what a seed repeats.
    """
    start = 0
    for position, layer in enumerate(buffer.layers):
        is_last = position + 1 == len(buffer.layers)
        if is_last or stds[buffer.layers[position + 1]] != stds[layer]:
            end = buffer.offsets[position + 1]
            yield start, end, stds[layer]
            start = end
