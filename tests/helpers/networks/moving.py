"""Operations that move rows or examples, and most of which bring them back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.networks.batches import Batch
from tests.helpers.networks.operations import Make, Operation, mask_of, operation


class Moving(Operation):
    """A linear layer on rows that were moved; a module of its own where there is need for more."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.form = nn.Linear(make.width, make.width), make.random.randrange(12)


@operation("other layout")
class OtherLayout(Moving):
    """There and back, by different operations."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        turns = (
            lambda x: x.transpose(0, 1),
            lambda x: x.permute(1, 0, 2),
            lambda x: x.movedim(0, 1),
            lambda x: torch.einsum("abc->bac", x),
            lambda x: torch.stack(x.unbind(1)),
            lambda x: x.swapaxes(0, 1).contiguous(),
        )
        turn = turns[self.form % len(turns)]
        return turn(self.layer(turn(x)).tanh())


@operation("batch permuted by index")
class Permuted(Moving):
    """Sorted by a key of the example, and unsorted."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        order = batch.keys.argsort()
        if self.form % 3 == 0:
            return self.layer(x.index_select(dim, order)).tanh().index_select(dim, order.argsort())
        if self.form % 3 == 1:
            where = (order,) if dim == 0 else (slice(None), order)
            back = (order.argsort(),) if dim == 0 else (slice(None), order.argsort())
            return self.layer(x[where]).tanh()[back]
        out = self.layer(x.index_select(dim, order)).tanh()
        return torch.zeros_like(x).index_copy(dim, order, out)


@operation("batch flipped or rolled")
class Turned(Moving):
    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.form % 2:
            return self.layer(x.flip(dim)).tanh().flip(dim)
        return self.layer(x.roll(1, dim)).tanh().roll(-1, dim)


@operation("time flipped or rolled")
class TimeTurned(Moving):
    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + self.layer(x.flip(1 - dim) if self.form % 2 else x.roll(1, 1 - dim)).tanh()


class Reorder(torch.autograd.Function):
    """Rows in another order, which is not to be seen from outside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.order, ctx.dim = order, dim
        return x.index_select(dim, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(ctx.dim, ctx.order.argsort()), None, None


@operation("batch permuted by a custom function")
class Custom(Moving):
    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        order = batch.keys.argsort()
        return Reorder.apply(self.layer(Reorder.apply(x, order, dim)).tanh(), order.argsort(), dim)


@operation("index_reduce")
class IndexReduce(Moving):
    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        order = batch.keys.argsort()
        zeros = torch.zeros_like(x)
        rows = zeros.index_reduce(dim, order, x, "mean", include_self=False)
        return self.layer(rows).tanh().index_select(dim, order)


@operation("_unsafe_index", "batch")
class UnsafeIndex(Moving):
    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        order = batch.keys.argsort()
        rows = torch.ops.aten._unsafe_index(x, [order])
        return torch.ops.aten._unsafe_index(self.layer(rows).tanh(), [order.argsort()])


@operation("examples in two parts")
class Parts(Moving):
    """In fixed places through the same layer, and by what the examples say through two of them."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.other = nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.form % 3 == 0:
            first, second = x.tensor_split(2, dim)
        elif self.form % 3 == 1:
            first = x.narrow(dim, 0, 1)
            second = x.narrow(dim, 1, batch.examples - 1)
        else:
            chosen = batch.keys > 0
            there, back = (~chosen).nonzero().squeeze(1), chosen.nonzero().squeeze(1)
            out = torch.cat([self.layer(x.index_select(dim, there)), self.other(x.index_select(dim, back))], dim)
            return out.index_select(dim, torch.cat([there, back]).argsort()).tanh()
        return torch.cat([self.layer(first), self.layer(second)], dim).tanh()


@operation("every second example")
class EverySecond(Moving):
    """Slices with steps, and put back in turns."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        x = x if dim == 0 else x.transpose(0, 1)
        even, odd = self.layer(x[::2]).tanh(), self.layer(x[1::2]).tanh()
        out = torch.zeros_like(x)
        out[::2], out[1::2] = even, odd
        return out if dim == 0 else out.transpose(0, 1)


@operation("experts")
class Experts(Operation):
    """Every token goes to the expert that its gate prefers; index_add brings them back."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.gate = nn.Linear(make.width, 3)
        self.experts = nn.ModuleList([nn.Linear(make.width, make.width) for _ in range(3)])
        self.form = make.random.randrange(3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        rows = x.reshape(-1, self.width)
        gates = self.gate(rows).softmax(-1)
        best, chosen = gates.max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(1)
            found = expert(rows[own]) * best[own].unsqueeze(1)
            if self.form == 0:
                out = out.index_add(0, own, found)
            elif self.form == 1:
                out = out.index_put((own,), found)
            else:
                out.index_add_(0, own, found)
        return x + out.view(x.shape)


@operation("rows without padding")
class Unpadded(Moving):
    """The rows that a mask selects, and back to their places."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        mask = mask_of(batch, dim)
        if self.form % 3 == 0:
            out = torch.zeros_like(x)
            out[mask.squeeze(2)] = self.layer(x[mask.squeeze(2)]).tanh()
            return out
        if self.form % 3 == 1:
            rows = x.masked_select(mask).view(-1, self.width)
            return x.masked_scatter(mask.expand_as(x), self.layer(rows).tanh())
        places = mask.flatten().nonzero().squeeze(1)
        rows = self.layer(x.reshape(-1, self.width).index_select(0, places)).tanh()
        return x.reshape(-1, self.width).index_copy(0, places, rows).view(x.shape)


@operation("rows sorted and unsorted")
class SortedRows(Moving):
    """All tokens of all examples in the order of one of their features."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        rows = x.reshape(-1, self.width)
        order = rows[:, 0].argsort()
        return self.layer(rows[order]).tanh()[order.argsort()].view(x.shape)


@operation("gather along time")
class Gather(Moving):
    """Each example's tokens in an order of its own."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        order = (batch.next_words + torch.arange(batch.tokens) / 100).argsort(1)
        index = (order if dim == 0 else order.t()).unsqueeze(2).expand_as(x)
        if self.form % 3 == 0:
            return x + self.layer(x.gather(1 - dim, index)).tanh()
        if self.form % 3 == 1:
            return x + self.layer(x.take_along_dim(index, 1 - dim)).tanh()
        first = torch.arange(batch.examples).unsqueeze(1)
        if dim == 0:
            return x + self.layer(x[first, order]).tanh()
        return x + self.layer(x[order.t(), first.t()]).tanh()


@operation("scatter along time")
class Scatter(Moving):
    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        index = (batch.words % batch.tokens if dim == 0 else (batch.words % batch.tokens).t()).unsqueeze(2)
        source, index = self.layer(x).tanh(), index.expand_as(x)
        if self.form % 2:
            return x.scatter_add(1 - dim, index, source)
        order = batch.words.argsort(1) if dim == 0 else batch.words.argsort(1).t()
        return x + torch.zeros_like(x).scatter(1 - dim, order.unsqueeze(2).expand_as(x), source)


@operation("sorted along time")
class SortedTime(Moving):
    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.form % 3 == 0:
            return self.layer(x.sort(1 - dim).values).tanh()
        if self.form % 3 == 1:
            return self.layer(x).topk(batch.tokens, 1 - dim).values.tanh()
        return self.layer(x).cummax(1 - dim).values.tanh()


@operation("segments summed")
class Segments(Moving):
    """All tokens as one long list; the sum of each example's by its number."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        owners = torch.arange(batch.examples).unsqueeze(1 - dim).expand(x.shape[:2]).reshape(-1)
        rows = self.layer(x.reshape(-1, self.width)).tanh()
        sums = rows.new_zeros(batch.examples, self.width)
        if self.form % 2:
            sums = sums.index_add(0, owners, rows)
        else:
            sums = sums.scatter_add(0, owners.unsqueeze(1).expand_as(rows), rows)
        return x + (sums[owners] / batch.tokens).view(x.shape)


@operation("examples as features of rows", "batch")
class Flattened(Moving):
    """(B, T·d), a norm over all of it by hand, and views back."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        flat = x.flatten(1)
        flat = flat / (1e-3 + flat.square().mean(1, keepdim=True)).sqrt()
        return self.layer(flat.view(x.shape)).tanh()


@operation("distinct words looked up once")
class Distinct(Operation):
    """Words of all examples that are the same share a row, as in a cache of features."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.words, self.layer = make.words(), nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        words = batch.words if dim == 0 else batch.words.t()
        distinct, places = words.unique(return_inverse=True)
        return x + self.layer(self.words(distinct)).tanh()[places]
