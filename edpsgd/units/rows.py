"""Rows of an activation: to which example, and so to which unit, each of them belongs.

How examples lie in a tensor is not known beforehand, so all the usual ways are tried on a first batch: if the losses
are scaled, each by its own power of two, the gradients of a row that belongs to one example are scaled by exactly that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from edpsgd.units.graph import MIXED, Order

WAYS = ("major", "second", "third", "minor", "first steps", "packed")
_DIMENSION = {"second": 1, "third": 2}
LAST_PLACE = 2  # where the dimension of the examples may be
Packing = tuple[int, ...]  # how many sequences have each step


@dataclass(frozen=True, eq=False)
class Layout:
    """The example at each place of one dimension.

    Attributes:
        dim: the dimension.
        labels: examples, as many as the dimension has places; on the CPU.
        is_plain: whether example 0 comes first with all of its places, then example 1 with as many, and so on.
    """

    dim: int
    labels: torch.Tensor
    is_plain: bool

    def means(self, other: Layout) -> bool:
        """Whether both say the same."""
        return self is other or (self.dim == other.dim and torch.equal(self.labels, other.labels))

    def along(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A value for each example, shaped so that it can be multiplied with a tensor of this layout."""
        shape = [-1 if place == self.dim else 1 for place in range(like.dim())]
        return values[self.labels.to(values.device)].view(shape)


class Layouts:
    """The ways in which the examples of one batch may lie in tensors; made once for each shape.

    Args:
        examples: in the batch.
        packings: of the packed sequences of the batch.
        reshaped: first sizes before and after the changes of shape in this batch.
    """

    def __init__(self, examples: int, packings: Iterable[Packing], reshaped: Collection[frozenset[int]]) -> None:
        self.examples, self._reshaped = examples, reshaped
        self._packings: dict[int, Packing | None] = {}
        whole = [packing for packing in packings if max(packing, default=0) == examples]
        for packing in whole:
            total = sum(packing)
            self._packings[total] = packing if self._packings.get(total, packing) == packing else None
        self._steps = {examples, *(size for packing in whole for size in packing)}
        self._made: dict[tuple[str, int, int], Layout] = {}
        self._kept: list[Order] = []  # so that their ids stay theirs

    def make(self, way: str, shape: Sequence[int], order: Order) -> Layout | None:
        """The layout of a tensor of this shape, None if the shape does not allow it."""
        dim = _DIMENSION.get(way, 0)
        if order is MIXED or dim >= len(shape) or not self._fits(way, shape[dim]):
            return None
        key = (way, shape[dim], id(order))
        if key not in self._made:
            self._kept.append(order)
            self._made[key] = self._lay_out(way, dim, shape[dim], order)
        return self._made[key]

    def _fits(self, way: str, size: int) -> bool:
        if way in ("major", "minor"):
            return size > 0 and size % self.examples == 0
        if way == "first steps":
            return size in self._steps  # of a packed sequence: any other part of a batch may be any examples
        return self._packings.get(size) is not None if way == "packed" else size == self.examples

    def _lay_out(self, way: str, dim: int, size: int, order: Order) -> Layout:
        own = order if isinstance(order, torch.Tensor) else torch.arange(self.examples)
        if way == "major":
            return Layout(dim, own.repeat_interleave(size // self.examples), order is None)
        if way == "packed":
            steps = self._packings[size] or ()
            return Layout(dim, torch.cat([own[:count] for count in steps]), False)
        labels = own[:size] if way == "first steps" else own.repeat(size // self.examples)
        return Layout(dim, labels, order is None and size == self.examples)

    def agreed(self, ways: Iterable[str], shape: Sequence[int], order: Order) -> tuple[Layout | None, bool]:
        """The layout of the first way that the shape allows, and whether it can be taken without looking at gradients.

        All others of the ways must mean the same, and the batch must have been reshaped in that way: else as many rows
        for each example may be chance.
        """
        made = {way: layout for way in WAYS if way in ways and (layout := self.make(way, shape, order)) is not None}
        if not made:
            return None, False
        first, *others = made.values()
        is_agreed = self._is_seen(next(iter(made)), shape[0]) and all(first.means(other) for other in others)
        return first, is_agreed or self.examples == 1

    def _is_seen(self, way: str, size: int) -> bool:
        if way not in ("major", "minor") or size == self.examples:
            return True
        outer = self.examples if way == "major" else size // self.examples
        return frozenset((size, outer)) in self._reshaped


class Units:
    """The units of a batch, and the rows of each.

    Args:
        of_examples: the unit of each example; None if each is its own.
        count: how many units there are.
        examples: how many examples there are.
    """

    def __init__(self, of_examples: torch.Tensor | None, count: int, examples: int) -> None:
        self.count, self._examples = count, examples
        self._are_own = of_examples is None
        self.of_examples = torch.arange(examples) if of_examples is None else of_examples.cpu()
        self._made: dict[tuple[int, int], Rows] = {}
        self._kept: list[Layout] = []

    @property
    def present(self) -> list[int]:
        """Units that are not empty."""
        return sorted(set(self.of_examples.tolist()))

    def sizes(self) -> torch.Tensor:
        """How many examples each unit has."""
        return torch.bincount(self.of_examples, minlength=self.count)

    def rows(self, layout: Layout, repeats: int, device: torch.device) -> Rows:
        """Of a tensor with this layout, if each place stands for several rows."""
        key = (id(layout), repeats)
        if key not in self._made:
            self._kept.append(layout)
            units = self.of_examples[layout.labels].repeat_interleave(repeats)
            self._made[key] = Rows(units, self.count, device, self._are_own and layout.is_plain)
        return self._made[key]


class Rows:
    """The unit of each row of a matrix.

    Args:
        units: of the rows; on the CPU.
        count: of units.
        device: where the matrix is.
        is_regular: whether all rows of unit 0 are known to come first, then as many of unit 1, and so on.
    """

    def __init__(self, units: torch.Tensor, count: int, device: torch.device, is_regular: bool = False) -> None:
        self._units, self.count, self._device = units, count, device
        self.is_regular = is_regular or self._find_regular()
        self.most = len(units) // count if self.is_regular else int(self._sizes().max())
        self._on_device: torch.Tensor | None = None
        self._places: torch.Tensor | None = None

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Of several matrices below each other."""
        if len(parts) == 1:
            return parts[0]
        return Rows(torch.cat([part._units for part in parts]), parts[0].count, parts[0]._device)

    def __len__(self) -> int:
        return len(self._units)

    def _sizes(self) -> torch.Tensor:
        return torch.bincount(self._units, minlength=self.count)

    def _find_regular(self) -> bool:
        if len(self._units) % self.count:
            return False
        return torch.equal(self._units, torch.arange(self.count).repeat_interleave(len(self._units) // self.count))

    @property
    def units(self) -> torch.Tensor:
        """The unit of each row, on the matrix's device."""
        if self._on_device is None:
            self._on_device = self._units.to(self._device)
        return self._on_device

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of each unit's rows."""
        if self.is_regular:
            return rows.reshape(self.count, self.most, *rows.shape[1:]).sum(1)
        return rows.new_zeros((self.count, *rows.shape[1:])).index_add_(0, self.units, rows)

    def blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of each unit as a matrix of its own, filled up with zeros at the end."""
        shape = (self.count, self.most, *rows.shape[1:])
        if self.is_regular:
            return rows.reshape(shape)
        padded = rows.new_zeros((self.count * self.most, *rows.shape[1:]))
        return padded.index_copy_(0, self._block_places(), rows).view(shape)

    def _block_places(self) -> torch.Tensor:
        if self._places is None:
            order = torch.argsort(self._units, stable=True)
            sizes = self._sizes()
            within = torch.arange(len(self._units)) - (sizes.cumsum(0) - sizes)[self._units[order]]
            places = torch.empty_like(order)
            places[order] = self._units[order] * self.most + within
            self._places = places.to(self._device)
        return self._places
