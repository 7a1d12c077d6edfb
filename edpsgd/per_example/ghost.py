"""The gradients of all units for one parameter, kept in factors: their norms, and their weighted sum.

A matrix's gradient is Σ lᵢ rᵢᵀ over the rows i of a unit, as a rule with the output gradient l and the input r. Its
squared norm is Σ (lᵢ·lⱼ)(rᵢ·rⱼ) over pairs of rows: no unit's own gradient need be made.

Such products leave the range of single precision long before the gradient does: rows of 1e-13 and 1e+13 are enough. So
it is known of every squared norm how much of it may be lost below that range. Where this is more than a millionth, or
where the range was left above, the unit's norm is made again in double precision, of its rows alone.
"""

from __future__ import annotations

import math

import torch

from edpsgd.per_example.layout import Rows

_CHUNK = 1 << 22  # elements that may be made at a time
_LITTLE = 1 << 17  # elements that may be kept whatever the batch is
_LOST = 1e6 * torch.finfo(torch.float32).tiny  # a squared norm above this hardly notices one lost product


class Products:
    """Scalar products of the rows of each unit; made once for a matrix that several layers read."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[torch.Tensor, Rows, torch.Tensor]] = {}

    def of(self, matrix: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Units x rows x rows."""
        key = (matrix.data_ptr(), matrix.shape, matrix.stride(), id(rows))
        if key not in self._made:  # the matrix is kept too: no other one gets its address
            blocks = rows.blocks(exact(matrix))
            self._made[key] = (matrix, rows, torch.bmm(blocks, blocks.mT))
        return self._made[key][2]


def exact(values: torch.Tensor) -> torch.Tensor:
    """In single precision at least."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def rounding(device: torch.device) -> float:
    """By how much products of matrices may be off, relative to their sizes: more if torch may round their factors."""
    if not hasattr(torch.backends, "fp32_precision"):  # torch before 2.9
        return 1e-5 if torch.get_float32_matmul_precision() == "highest" else 1e-2
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    settings = {
        getattr(place, "fp32_precision", "ieee") for place in (torch.backends, getattr(backend, "matmul", None))
    }
    return 1e-2 if settings & {"tf32", "bf16"} else 1e-5


class LayerGradients:
    """What the units' gradients for one parameter are made of. Everything that is added counts, with cross terms.

    Args:
        parameter: the layer.
        units: how many there are.
        products: those of the batch.
    """

    def __init__(self, parameter: torch.Tensor, units: int, products: Products) -> None:
        self._parameter, self._units, self._products = parameter, units, products
        self._height = parameter.shape[0] if parameter.dim() > 1 else parameter.numel()
        self._width = parameter.numel() // max(1, self._height)
        self._dense: list[tuple[torch.Tensor, torch.Tensor, Rows]] = []
        self._sparse: list[tuple[torch.Tensor, torch.Tensor, Rows]] = []
        self._own: torch.Tensor | None = None  # units x elements
        self._dtype = torch.promote_types(parameter.dtype, torch.float32)

    def _fit(self, values: torch.Tensor) -> torch.Tensor:
        """In the parameter's precision, as it may be used in several; half precision waits until it is needed."""
        is_half = values.dtype not in (torch.float32, torch.float64)
        return values if is_half and self._dtype is torch.float32 else values.to(self._dtype)

    def add_products(self, left: torch.Tensor, right: torch.Tensor, rows: Rows) -> None:
        """Adds Σ leftᵢ rightᵢᵀ over the rows of each unit."""
        self._dense.append((self._fit(left), self._fit(right), rows))

    def add_chosen(self, numbers: torch.Tensor, right: torch.Tensor, rows: Rows) -> None:
        """Adds rightᵢ to the row of the parameter that has the number numbersᵢ, for the rows of each unit."""
        self._sparse.append((numbers, self._fit(right), rows))

    def add_own(self, gradients: torch.Tensor) -> None:
        """Adds a gradient for each unit, in a tensor that nobody else needs."""
        flat = gradients.reshape(self._units, -1).to(self._dtype)
        self._own = flat if self._own is None else self._own.add_(flat)

    def own(self) -> torch.Tensor:
        """Gradients of the units that others may add to: units x elements."""
        if self._own is None:
            self._own = self._parameter.new_zeros((self._units, self._parameter.numel()), dtype=self._dtype)
        return self._own

    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all units, and for which of them single precision will not do: see ``precise_norms``."""
        self._join()
        if self._own is not None or self._is_small():
            self._make_own()
        if self._own is not None:
            squares = self._own.square().sum(1)
            return squares.sqrt(), _has_left(squares, _LOST * self._own.shape[1])
        parts = [self._dense_squares(*one) for one in self._dense] + [self._sparse_squares(*s) for s in self._sparse]
        parts += [2.0 * self._cross(*d, *s) for d in self._dense for s in self._sparse]
        if not parts:
            none = self._parameter.new_zeros(self._units)
            return none, none.bool()
        squares, sizes, lost = torch.stack(parts).sum(0)
        # Where rows cancel, rounding could hide a gradient: rather too large a norm, which clips more.
        off = (1e-13 if squares.dtype is torch.float64 else rounding(squares.device)) * sizes
        is_rounded = squares < 10 * off
        norms = torch.where(is_rounded, squares.clamp(min=0.0) + off, squares).sqrt()
        return norms, _has_left(squares, lost) | (is_rounded & (squares.dtype is torch.float32))

    def precise_norms(self, chosen: torch.Tensor) -> torch.Tensor:
        """Of some units, in double precision, where no product of what single precision holds leaves the range.

        Args:
            chosen: whether each unit is one of them; on the CPU.
        """
        like = self._parameter.new_empty((), dtype=torch.float64).expand(self._parameter.shape)
        count, numbers = int(chosen.sum()), chosen.cumsum(0) - 1
        precise = LayerGradients(like, count, Products())
        for parts, add in ((self._dense, precise.add_products), (self._sparse, precise.add_chosen)):
            for first, second, rows in parts:
                kept, own_rows = rows.of_units(chosen, numbers, count)
                if len(own_rows):
                    add(first[kept], second[kept], own_rows)
        if self._own is not None:
            precise.add_own(self._own[chosen.to(self._own.device)])
        return precise.norms()[0]

    def add_weighted_(self, total: torch.Tensor, factors: torch.Tensor) -> None:
        """Adds the sum of the units' gradients, each times its factor."""
        matrix = total.view(self._height, self._width)
        if self._own is not None:
            total.view(-1).add_(self._own.T @ factors.to(self._own.dtype))
            return
        for left, right, rows in self._dense:
            left, right, weights = exact(left), exact(right), factors[rows.units].unsqueeze(1)
            scaled = (left * weights, right) if left.shape[1] <= right.shape[1] else (left, right * weights)
            matrix.addmm_(scaled[0].to(matrix.dtype).T, scaled[1].to(matrix.dtype))
        for numbers, right, rows in self._sparse:
            right = exact(right)
            matrix.index_add_(0, numbers, (right * factors[rows.units].unsqueeze(1)).to(matrix.dtype))

    def norm_of(self, unit: int) -> float:
        """Of the gradient of one unit, which is made of its own rows."""
        one = self._of_unit(unit)
        norm = float(torch.linalg.vector_norm(one))
        is_in_range = math.sqrt(_LOST) * one.numel() < norm < math.inf
        return norm if is_in_range else float(torch.linalg.vector_norm(one, dtype=torch.float64))

    def _of_unit(self, unit: int) -> torch.Tensor:
        """All of its elements that may differ from zero."""
        if self._own is not None:
            return self._own[unit]
        sparse = [(numbers[rows.units == unit], right[rows.units == unit]) for numbers, right, rows in self._sparse]
        height = self._height
        if not self._dense and len(sparse) == 1:  # only the rows that it has
            chosen, numbers = torch.unique(sparse[0][0], return_inverse=True)
            sparse, height = [(numbers, sparse[0][1])], len(chosen)
        total = self._parameter.new_zeros((height, self._width), dtype=self._dtype)
        for left, right, rows in self._dense:
            is_own = rows.units == unit
            total.addmm_(left[is_own].to(total.dtype).T, right[is_own].to(total.dtype))
        for numbers, right in sparse:
            total.index_add_(0, numbers, right.to(total.dtype))
        return total

    def drop(self, units: torch.Tensor) -> None:
        """Makes the gradients of some units zero, whatever they hold: NaN times a factor of zero would be NaN."""
        if self._own is not None:
            self._own[units] = 0.0
        for parts in (self._dense, self._sparse):
            for number, (first, second, rows) in enumerate(parts):
                is_dropped = units[rows.units]
                first = first.masked_fill(is_dropped.unsqueeze(1), 0.0) if parts is self._dense else first
                parts[number] = (first, second.masked_fill(is_dropped.unsqueeze(1), 0.0), rows)

    # ---------------------------------------------------------------- choices

    def _join(self) -> None:
        """One matrix for all dense parts and one for all sparse ones."""
        for parts in (self._dense, self._sparse):
            if len(parts) > 1:
                first, second, rows = zip(*parts, strict=True)
                parts[:] = [(torch.cat(first), torch.cat(second), Rows.joined(rows))]

    def _is_small(self) -> bool:
        """Whether to keep the units' own gradients, which then make the sum too: few steps, and little memory."""
        size = self._height * self._width
        if self._dense:
            left, right, rows = self._dense[0]
            steps = rows.most * (left.shape[1] + right.shape[1])
            return size <= 4 * steps and self._units * size <= max(_LITTLE, 2 * left.numel() + 2 * right.numel())
        return bool(self._sparse) and self._units * self._height <= 4 * len(self._sparse[0][2])

    def _is_wide(self, left: torch.Tensor, right: torch.Tensor, rows: Rows) -> bool:
        """Whether products of rows take fewer steps than the units' own gradients."""
        return self._height * self._width > rows.most * (left.shape[1] + right.shape[1])

    def _make_own(self) -> None:
        own = self.own().view(self._units, self._height, self._width)
        for left, right, rows in self._dense:
            own.baddbmm_(rows.blocks(exact(left)).mT, rows.blocks(exact(right)))
        for numbers, right, rows in self._sparse:
            places = rows.units * self._height + numbers
            own.view(-1, self._width).index_add_(0, places, exact(right).to(own.dtype))
        self._dense, self._sparse = [], []

    # ---------------------------------------------------------------- squared norms, and the sizes of what was added up

    def _dense_squares(self, left: torch.Tensor, right: torch.Tensor, rows: Rows) -> torch.Tensor:
        if self._is_wide(left, right, rows):
            of_left, of_right = self._products.of(left, rows), self._products.of(right, rows)
            largest = 1.0 + _largest_square(of_left) + _largest_square(of_right)
            lost = _LOST * rows.most**2 * max(left.shape[1], right.shape[1]) * largest
            return _added(of_left * of_right, lost)
        lefts, rights = rows.blocks(exact(left)), rows.blocks(exact(right))
        at_once = max(1, _CHUNK // (self._height * self._width))
        parts = [slice(begin, begin + at_once) for begin in range(0, self._units, at_once)]
        squares = torch.cat([torch.bmm(lefts[part].mT, rights[part]).square().sum((1, 2)) for part in parts])
        return torch.stack((squares, squares, torch.full_like(squares, _LOST * self._height * self._width)))

    def _sparse_squares(self, numbers: torch.Tensor, right: torch.Tensor, rows: Rows) -> torch.Tensor:
        blocks = rows.blocks(numbers)  # where they are filled up, the products are zero
        are_equal = blocks.unsqueeze(1) == blocks.unsqueeze(2)
        products = self._products.of(right, rows)
        lost = products.new_full((self._units,), _LOST * rows.most**2 * right.shape[1])
        return _added(products * are_equal, lost)

    def _cross(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        rows: Rows,
        numbers: torch.Tensor,
        others: torch.Tensor,
        other_rows: Rows,
    ) -> torch.Tensor:
        """Products of dense parts with sparse ones: what the left rows have at the numbers, times the right rows."""
        places = other_rows.blocks(numbers).unsqueeze(1).expand(-1, rows.most, -1)  # filled up rows are zero
        picked = rows.blocks(exact(left)).gather(2, places)
        products = torch.bmm(rows.blocks(exact(right)), other_rows.blocks(exact(others)).mT)
        largest = 1.0 + picked.abs().amax((1, 2))
        lost = _LOST * rows.most * other_rows.most * right.shape[1] * largest
        return _added(picked * products, lost)


def _added(products: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """Of each unit: the sum of its products, that of their sizes, and what matters if it was lost to underflow."""
    return torch.stack((products.sum((1, 2)), products.abs().sum((1, 2)), lost))


def _largest_square(products: torch.Tensor) -> torch.Tensor:
    """Of the lengths of each unit's rows."""
    return products.diagonal(dim1=1, dim2=2).amax(1)


def _has_left(squares: torch.Tensor, lost: torch.Tensor | float) -> torch.Tensor:
    """Whether each squared norm may have left the range of single precision, below or above."""
    if squares.dtype is torch.float64:
        return torch.zeros_like(squares, dtype=torch.bool)
    return ~((squares > lost) & torch.isfinite(squares))
