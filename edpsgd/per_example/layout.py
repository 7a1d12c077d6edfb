"""Rows of an activation: to which unit each of them belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Layout:
    """The example at each place of one dimension.

    Attributes:
        dim: the dimension.
        labels: examples, as many as the dimension has places; on the CPU.
    """

    dim: int
    labels: torch.Tensor


class Units:
    """The units of a batch, and the rows of each.

    Args:
        of_examples: the unit of each example; None if each is its own.
        count: how many units there are.
        examples: how many examples there are.
    """

    def __init__(self, of_examples: torch.Tensor | None, count: int, examples: int) -> None:
        self.count, self._examples = count, examples
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
            self._made[key] = Rows(units, self.count, device)
        return self._made[key]


class Rows:
    """The unit of each row of a matrix.

    Args:
        units: of the rows; on the CPU.
        count: of units.
        device: where the matrix is.
    """

    def __init__(self, units: torch.Tensor, count: int, device: torch.device) -> None:
        self._units, self.count, self._device = units, count, device
        self.is_regular = self._find_regular()  # all rows of unit 0 come first, then as many of unit 1, and so on
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

    def of_units(self, chosen: torch.Tensor, numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, Rows]:
        """Which rows belong to some of the units, on the matrix's device, and those rows alone.

        Args:
            chosen: whether each unit is one of them; on the CPU.
            numbers: the new number of each unit.
            count: of the chosen units.
        """
        kept = chosen[self._units]
        return kept.to(self._device), Rows(numbers[self._units[kept]], count, self._device)

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
