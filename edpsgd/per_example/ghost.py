"""The gradients of all units of one parameter, kept in factors: norms and weighted sums.

A matrix's gradient is Σ lᵢ rᵢᵀ over the rows i of a unit: the output gradient l of a token and its
activation r, or the other way round where the parameter is transposed. Its squared norm is Σ
(lᵢ·lⱼ)(rᵢ·rⱼ) over pairs of rows, the ghost norm, for which no unit's gradient is instantiated
(Goodfellow 2015; Li et al. 2022). For T rows of widths p and d that takes T²(p + d) steps and
instantiation T·p·d: each layer takes what is cheaper (after the mixed ghost clipping of Bu et al.
2022, whose measure is memory), and small gradients are instantiated where that is a little dearer,
since they then make the sum too. Either way the weighted sum needs no second backward pass
(book-keeping, Bu et al. 2023).

Such products leave the range of single precision long before the gradient does: rows of 1e-13 and
1e+13 are enough. So it is known of every squared norm how much of it may be lost below that range.
Where this is more than a millionth, or where the range was left above, the unit's norm is made
again in double precision, of its rows alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch

from edpsgd.per_example.fast_products import add_product_, multiply_pairs
from edpsgd.per_example.layout import Rows
from edpsgd.per_example.precision import UNDERFLOW, exact, is_out_of_range, rounding
from edpsgd.per_example.row_products import Products, chosen_squares, cross_products, ghost_squares

_CHUNK = 1 << 22  # elements that may be made at a time
_LITTLE = 1 << 17  # elements that may be kept whatever the batch is
Part = tuple[torch.Tensor, torch.Tensor, Rows]


@dataclass(eq=False)
class LayerGradients:
    """What the units' gradients of one parameter are made of.

    Everything that is added counts, with cross terms. The parameter is taken for a matrix, height x
    width: a vector for one of width 1, and a kernel for one with all but its first dimension in the
        width.

    Attributes:
        parameter: the layer.
        count: how many units there are.
        products: those of the batch.
    """

    parameter: torch.Tensor
    count: int
    products: Products
    _dense: list[Part] = field(default_factory=list, repr=False)  # left and right factors
    # Numbers of rows, and what is added to these.
    _sparse: list[Part] = field(default_factory=list, repr=False)
    _instantiated: torch.Tensor | None = field(default=None, repr=False)  # units x elements

    @property
    def height(self) -> int:
        """Rows of the parameter."""
        return self.parameter.shape[0] if self.parameter.dim() > 1 else self.parameter.numel()

    @property
    def width(self) -> int:
        """Elements of each of its rows."""
        return math.prod(self.parameter.shape[1:])  # also if it has no rows

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the units' gradients."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    # ---------------------------------------------------------------- what rules add

    def add_products(self, left: torch.Tensor, right: torch.Tensor, rows: Rows) -> None:
        """Adds Σ leftᵢ rightᵢᵀ over the rows of each unit: rows x height and rows x width."""
        self._dense.append((self._fit(left), self._fit(right), rows))

    def add_chosen(self, numbers: torch.Tensor, right: torch.Tensor, rows: Rows) -> None:
        """Adds rightᵢ to the parameter's row numbersᵢ, for the rows of each unit."""
        self._sparse.append((numbers, self._fit(right), rows))

    def add_instantiated(self, gradients: torch.Tensor) -> None:
        """Adds a gradient for each unit, units x shape, in a tensor that nobody else needs."""
        flat = gradients.reshape(self.count, self.parameter.numel()).to(self.dtype)
        self._instantiated = flat if self._instantiated is None else self._instantiated.add_(flat)

    def instantiated(self) -> torch.Tensor:
        """Gradients of the units that others may add to: units x elements."""
        if self._instantiated is None:
            self._instantiated = self.parameter.new_zeros(
                (self.count, self.parameter.numel()),
                dtype=self.dtype,
            )
        return self._instantiated

    def _fit(self, values: torch.Tensor) -> torch.Tensor:
        """In the parameter's precision, as it may be used in several.

        Half precision stays until it is multiplied (``precision.exact``), to take half the memory.
        """
        is_half = values.dtype not in (torch.float32, torch.float64)
        return values if is_half and self.dtype is torch.float32 else values.to(self.dtype)

    # ---------------------------------------------------------------- norms

    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all units, and for which of them ``precise_norms`` must be asked."""
        self._join_parts()
        if self._instantiated is not None or self._should_instantiate():
            return self._instantiated_norms()
        parts = [self._dense_squares(*dense) for dense in self._dense]
        parts += [chosen_squares(*sparse, self.products) for sparse in self._sparse]
        for dense, sparse in itertools.product(self._dense, self._sparse):
            parts.append(2.0 * cross_products(dense, sparse))
        if not parts:
            none = self.parameter.new_zeros(self.count)
            return none, none.bool()
        squares, sizes, lost = torch.stack(parts).sum(0)
        # Where rows cancel, rounding could hide a gradient: rather too large a norm, which clips
        # more.
        off = (1e-13 if squares.dtype is torch.float64 else rounding(squares.device)) * sizes
        is_rounded = squares < 10 * off
        norms = torch.where(is_rounded, squares.clamp(min=0.0) + off, squares).sqrt()
        if squares.dtype is torch.float64:
            return norms, torch.zeros_like(is_rounded)
        return norms, is_out_of_range(squares, lost) | is_rounded

    def precise_norms(self, chosen: torch.Tensor) -> torch.Tensor:
        """Of some units, in double precision, whose range holds all products of single ones.

        Args:
            chosen: whether each unit is one of them; on the CPU.
        """
        like = self.parameter.new_empty((), dtype=torch.float64).expand(self.parameter.shape)
        count, numbers = int(chosen.sum()), chosen.cumsum(0) - 1
        precise = LayerGradients(like, count, Products())
        for parts, add in ((self._dense, precise.add_products), (self._sparse, precise.add_chosen)):
            for first, second, rows in parts:
                is_kept, kept_rows = rows.of_units(chosen, numbers, count)
                if len(kept_rows):
                    add(first[is_kept], second[is_kept], kept_rows)
        if self._instantiated is not None:
            precise.add_instantiated(self._instantiated[chosen.to(self._instantiated.device)])
        return precise.norms()[0]

    def norm_of(self, unit: int) -> float:
        """Of the gradient of one unit, which is instantiated from its own rows."""
        gradient = self._instantiate_unit(unit)
        norm = float(torch.linalg.vector_norm(gradient))
        is_in_range = math.sqrt(UNDERFLOW) * gradient.numel() < norm < math.inf
        if is_in_range:
            return norm
        return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))

    def _join_parts(self) -> None:
        """One matrix for all dense parts and one for all sparse ones."""
        for parts in (self._dense, self._sparse):
            if len(parts) > 1:
                first, second, rows = zip(*parts, strict=True)
                parts[:] = [(torch.cat(first), torch.cat(second), Rows.joined(rows))]

    def _should_instantiate(self) -> bool:
        """Whether to keep the units' gradients, which then make the sum too: if they are small."""
        size = self.height * self.width
        if self._dense:
            left, right, rows = self._dense[0]
            steps = rows.most * (left.shape[1] + right.shape[1])
            memory = max(_LITTLE, 2 * left.numel() + 2 * right.numel())
            return size <= 4 * steps and self.count * size <= memory
        return bool(self._sparse) and self.count * self.height <= 4 * len(self._sparse[0][2])

    def _prefers_ghost_norm(self, left: torch.Tensor, right: torch.Tensor, rows: Rows) -> bool:
        """Whether products of rows take fewer steps than instantiation: T(p + d) < pd."""
        return self.height * self.width > rows.most * (left.shape[1] + right.shape[1])

    def _instantiated_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        gradients = self._instantiate()
        squares = gradients.square().sum(1)
        return squares.sqrt(), is_out_of_range(squares, UNDERFLOW * gradients.shape[1])

    def _instantiate(self) -> torch.Tensor:
        """The gradients of all units, units x elements; they take the place of all parts."""
        for left, right, rows in self._dense:
            lefts, rights = rows.blocks(exact(left)), rows.blocks(exact(right))
            self.add_instantiated(multiply_pairs(lefts.mT, rights))
        gradients = self.instantiated()
        for numbers, right, rows in self._sparse:
            places = rows.units * self.height + numbers
            gradients.view(-1, self.width).index_add_(0, places, exact(right).to(gradients.dtype))
        self._dense, self._sparse = [], []
        return gradients

    def _dense_squares(self, left: torch.Tensor, right: torch.Tensor, rows: Rows) -> torch.Tensor:
        """As ``row_products`` has them: by products of rows, or instantiated a few at a time."""
        if self._prefers_ghost_norm(left, right, rows):
            return ghost_squares(left, right, rows, self.products)
        size = self.height * self.width
        at_once = max(1, _CHUNK // size)
        lefts = torch.split(rows.blocks(exact(left)), at_once)
        rights = torch.split(rows.blocks(exact(right)), at_once)
        found = []
        for some_lefts, some_rights in zip(lefts, rights, strict=True):
            gradients = multiply_pairs(some_lefts.mT, some_rights)
            found.append(gradients.square().sum((1, 2)))
        squares = torch.cat(found)
        return torch.stack((squares, squares, torch.full_like(squares, UNDERFLOW * size)))

    def _instantiate_unit(self, unit: int) -> torch.Tensor:
        """All elements of one unit's gradient that may differ from zero."""
        if self._instantiated is not None:
            return self._instantiated[unit]
        sparse = []
        for numbers, right, rows in self._sparse:
            is_own = rows.units == unit
            sparse.append((numbers[is_own], right[is_own]))
        height = self.height
        if not self._dense and len(sparse) == 1:  # only the rows of the parameter that it has
            chosen, numbers = torch.unique(sparse[0][0], return_inverse=True)
            sparse, height = [(numbers, sparse[0][1])], len(chosen)
        total = self.parameter.new_zeros((height, self.width), dtype=self.dtype)
        for left, right, rows in self._dense:
            is_own = rows.units == unit
            total.addmm_(left[is_own].to(total.dtype).T, right[is_own].to(total.dtype))
        for numbers, right in sparse:
            total.index_add_(0, numbers, right.to(total.dtype))
        return total

    # ---------------------------------------------------------------- the weighted sum

    def add_weighted_(self, total: torch.Tensor, factors: torch.Tensor) -> None:
        """Adds the units' gradients times their factors to a tensor of the parameter's shape."""
        matrix = total.view(self.height, self.width)
        if self._instantiated is not None:
            total.view(-1).add_(self._instantiated.T @ factors.to(self._instantiated.dtype))
            return
        for left, right, rows in self._dense:
            left, right, weights = exact(left), exact(right), factors[rows.units].unsqueeze(1)
            if left.shape[1] <= right.shape[1]:  # the narrower one is scaled
                left = left * weights
            else:
                right = right * weights
            add_product_(matrix, left.to(matrix.dtype).T, right.to(matrix.dtype))
        for numbers, right, rows in self._sparse:
            weighted = exact(right) * factors[rows.units].unsqueeze(1)
            matrix.index_add_(0, numbers, weighted.to(matrix.dtype))

    def drop(self, units: torch.Tensor) -> None:
        """Makes the gradients of some units zero: NaN times a factor of zero would be NaN.

        Args:
            units: whether each is dropped; on the parameter's device.
        """
        if self._instantiated is not None:
            self._instantiated[units] = 0.0
        for place, (left, right, rows) in enumerate(self._dense):
            is_dropped = units[rows.units].unsqueeze(1)
            self._dense[place] = (
                left.masked_fill(is_dropped, 0.0),
                right.masked_fill(is_dropped, 0.0),
                rows,
            )
        for place, (numbers, right, rows) in enumerate(self._sparse):
            is_dropped = units[rows.units].unsqueeze(1)
            self._sparse[place] = (numbers, right.masked_fill(is_dropped, 0.0), rows)
