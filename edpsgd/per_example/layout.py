"""Which unit each row of a matrix belongs to.

A unit is an example, or a group of examples that is clipped as one. Rules turn output gradients and
activations into matrices with one row for each example and place (as a token), and add up the rows
of each unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

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


@dataclass(eq=False)
class Units:
    """The units of a batch.

    Attributes:
        of_examples: the unit of each example; on the CPU.
        count: how many units there are, empty ones included.
    """

    of_examples: torch.Tensor
    count: int
    _rows_of: dict[tuple[int, int, torch.device], Rows] = field(default_factory=dict, repr=False)
    _labels: list[torch.Tensor] = field(default_factory=list, repr=False)

    @property
    def present(self) -> list[int]:
        """Units that are not empty, in ascending order."""
        return sorted(set(self.of_examples.tolist()))

    def sizes(self) -> torch.Tensor:
        """How many examples each unit has."""
        return torch.bincount(self.of_examples, minlength=self.count)

    def only(self, unit: int) -> torch.Tensor:
        """A factor for each unit: 1 for this one, 0 for all others; on the CPU."""
        factors = torch.zeros(self.count)
        factors[unit] = 1.0
        return factors

    def rows(self, layout: Layout, repeats: int, device: torch.device) -> Rows:
        """The units of a matrix whose rows follow a layout.

        Args:
            layout: of the tensor that the matrix was made of.
            repeats: how many rows each place of the layout's dimension stands for.
            device: where the matrix is.

        Returns:
            The same object for the same labels, so that what follows from it is computed once.
        """
        key = (id(layout.labels), repeats, device)
        if key not in self._rows_of:
            self._labels.append(layout.labels)  # they stay alive: no others get their id
            units = self.of_examples[layout.labels].repeat_interleave(repeats)
            self._rows_of[key] = Rows(units, self.count, device)
        return self._rows_of[key]


def make_units(losses: torch.Tensor, units: torch.Tensor | None, count: int | None) -> Units:
    """The units of a batch; the arguments are those of ``UnitGradients.backward``."""
    if losses.dim() != 1 or not losses.is_floating_point():
        given = f"{losses.dtype} of shape {tuple(losses.shape)}"
        raise ValueError(f"losses must be one number for each example, got {given}")
    examples = len(losses)
    if units is None:
        if count not in (None, examples):
            allowed = f"the number of losses, {examples}, where units is None"
            raise ValueError(f"count must be {allowed}, got {count!r}")
        return Units(torch.arange(examples), examples)
    if units.shape != losses.shape or units.dtype is not torch.int64:
        given = f"{units.dtype} of shape {tuple(units.shape)}"
        raise ValueError(f"units must be {examples} int64 numbers, got {given}")
    numbers = units.cpu()
    least, largest = (int(numbers.min()), int(numbers.max())) if examples else (0, -1)
    if least < 0 or (count is not None and largest >= count):
        given = f"{least} to {largest} and count {count}"
        raise ValueError(f"units must lie between 0 and count - 1, got {given}")
    return Units(numbers, largest + 1 if count is None else count)


@dataclass(eq=False)
class Rows:
    """The unit of each row of a matrix.

    Attributes:
        on_cpu: the units of the rows; on the CPU.
        count: how many units there are.
        device: where the matrix is.
    """

    on_cpu: torch.Tensor
    count: int
    device: torch.device

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Of several matrices below each other."""
        if len(parts) == 1:
            return parts[0]
        return Rows(torch.cat([part.on_cpu for part in parts]), parts[0].count, parts[0].device)

    def __len__(self) -> int:
        return len(self.on_cpu)

    @cached_property
    def is_regular(self) -> bool:
        """Whether all rows of unit 0 come first, then as many of unit 1, and so on."""
        if len(self) % self.count:
            return False
        each = len(self) // self.count
        return torch.equal(self.on_cpu, torch.arange(self.count).repeat_interleave(each))

    @cached_property
    def most(self) -> int:
        """How many rows the unit with most of them has."""
        return len(self) // self.count if self.is_regular else int(self._sizes().max())

    @cached_property
    def units(self) -> torch.Tensor:
        """The unit of each row, on the matrix's device."""
        return self.on_cpu.to(self.device)

    def of_units(
        self,
        chosen: torch.Tensor,
        numbers: torch.Tensor,
        count: int,
    ) -> tuple[torch.Tensor, Rows]:
        """Which rows belong to some of the units, on the matrix's device, and those rows alone.

        Args:
            chosen: whether each unit is one of them; on the CPU.
            numbers: the new number of each unit.
            count: of the chosen units.
        """
        is_kept = chosen[self.on_cpu]
        return is_kept.to(self.device), Rows(numbers[self.on_cpu[is_kept]], count, self.device)

    def sums(self, matrix: torch.Tensor) -> torch.Tensor:
        """The sum of each unit's rows: units x the shape of a row."""
        if self.is_regular:
            return matrix.reshape(self.count, self.most, *matrix.shape[1:]).sum(1)
        return matrix.new_zeros((self.count, *matrix.shape[1:])).index_add_(0, self.units, matrix)

    def blocks(self, matrix: torch.Tensor) -> torch.Tensor:
        """Units x most rows x shape of a row: each unit's rows, filled up with zeros."""
        shape = (self.count, self.most, *matrix.shape[1:])
        if self.is_regular:
            return matrix.reshape(shape)
        padded = matrix.new_zeros((self.count * self.most, *matrix.shape[1:]))
        return padded.index_copy_(0, self._places_in_blocks, matrix).view(shape)

    @cached_property
    def _places_in_blocks(self) -> torch.Tensor:
        """Where each row goes, if the blocks of all units lie below each other."""
        order = torch.argsort(self.on_cpu, stable=True)
        sorted_units = self.on_cpu[order]
        sizes = self._sizes()
        first_rows = sizes.cumsum(0) - sizes
        within_block = torch.arange(len(self)) - first_rows[sorted_units]
        places = torch.empty_like(order)
        places[order] = sorted_units * self.most + within_block
        return places.to(self.device)

    def _sizes(self) -> torch.Tensor:
        return torch.bincount(self.on_cpu, minlength=self.count)
