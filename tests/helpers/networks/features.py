"""Operations on the features of single tokens: they take both layouts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.helpers.networks.batches import LONGEST, Batch
from tests.helpers.networks.operations import Make, Operation, mask_of, operation, parameter


@operation("linear")
class Linear(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.Linear(make.width, make.width, bias=make.chance(0.8))

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.layer(x).tanh()


@operation("linear with an in-place ReLU")
class InPlace(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.above = nn.Linear(make.width, make.width), nn.Linear(make.width, make.width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + self.above(self.relu(self.layer(x)))


@operation("linear on flat rows")
class FlatRows(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.layer(x.reshape(-1, self.width)).view(x.shape).tanh()


@operation("layer norm")
class LayerNorm(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.norm = nn.LayerNorm(make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.norm(x)


@operation("RMS norm")
class RMSNorm(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.norm = nn.RMSNorm(make.width, eps=1e-5)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.norm(x)


@operation("RMS norm by hand")
class HandMadeNorm(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.gain = parameter(make.width, mean=1.0)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.gain


@operation("gated linear unit")
class GatedLinear(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.is_chunked = nn.Linear(make.width, 2 * make.width), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.is_chunked:
            value, gate = self.layer(x).chunk(2, dim=-1)
            return x + value * F.silu(gate)
        return x + F.glu(self.layer(x), dim=-1)


@operation("parameter added")
class ParameterAdded(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.bias = parameter(make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return (x + self.bias).tanh()


@operation("parameter multiplied")
class ParameterMultiplied(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.gain = parameter(make.width, mean=1.0)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x * self.gain


@operation("parameter in two layouts")
class TwoLayouts(Operation):
    """One parameter is added, another one multiplied, before and after a transpose."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.bias, self.gain = parameter(make.width), parameter(make.width, mean=1.0)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        x = (x * self.gain + self.bias).tanh()
        return ((x.transpose(0, 1) + self.bias) * self.gain).transpose(0, 1)


@operation("layer norm in two layouts")
class NormInTwoLayouts(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.norm, self.is_copied = nn.LayerNorm(make.width), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        x = self.norm(x).sin().transpose(0, 1)
        return self.norm(x.contiguous() if self.is_copied else x).transpose(0, 1)


@operation("residual block")
class Residual(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.norm = nn.LayerNorm(make.width)
        self.up, self.down = nn.Linear(make.width, 6), nn.Linear(6, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@operation("bilinear")
class Bilinear(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.weight, self.bias = parameter(make.width, 3, make.width), parameter(make.width)
        self.below = nn.Linear(make.width, 3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return F.bilinear(self.below(x), x, self.weight, self.bias).tanh()


@operation("weight norm")
class WeightNorm(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = parametrizations.weight_norm(nn.Linear(make.width, make.width))

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.layer(x).tanh()


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


@operation("parametrized weight")
class Parametrized(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.Linear(make.width, make.width)
        parametrize.register_parametrization(self.layer, "weight", Symmetric())

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.layer(x).tanh()


@operation("einsum with a weight")
class Einsum(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.weight, self.form = parameter(make.width, make.width), make.random.randrange(3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.form == 0:
            return torch.einsum("abi,ij->abj", x, self.weight).tanh()
        if self.form == 1:  # the layouts change places within
            return torch.einsum("abi,ij->baj", x, self.weight).transpose(0, 1).tanh()
        return (x @ self.weight).tanh()


@operation("tied weights")
class Tied(Operation):
    """There with a weight, and back with its transpose."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.weight = parameter(5, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight).tanh(), self.weight.t())


@operation("checkpoint")
class Checkpoint(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.norm, self.layer = nn.LayerNorm(make.width), nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.norm(x)).tanh()

        return checkpoint(inner, x, use_reentrant=False)


@operation("dropout")
class Dropout(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.dropout = nn.Linear(make.width, make.width), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.layer(self.dropout(x)).tanh()


@operation("features in chunks")
class Chunks(Operation):
    """Each half of the features through a layer of its own."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        half = make.width // 2
        self.layers, self.is_split = nn.ModuleList([nn.Linear(half, half) for _ in range(2)]), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        parts = x.split(self.width // 2, dim=-1) if self.is_split else x.chunk(2, dim=-1)
        return torch.cat([layer(part).tanh() for layer, part in zip(self.layers, parts, strict=True)], -1)


@operation("masked fill")
class MaskedFill(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.form = nn.Linear(make.width, make.width), make.random.randrange(3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        x, padding = self.layer(x), ~mask_of(batch, dim)
        if self.form == 0:
            return x.masked_fill(padding, 0.0)
        if self.form == 1:
            x.view(x.shape).masked_fill_(padding, 0.0)
            return x
        return torch.where(padding, torch.zeros_like(x), x)


@operation("in place on a slice")
class InPlaceSlice(Operation):
    """The first token is replaced by another function of it."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.first = nn.Linear(make.width, make.width), nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        out = self.layer(x)
        out.select(1 - dim, 0).copy_(self.first(x.select(1 - dim, 0)))
        return out


@operation("repeated rows")
class Repeated(Operation):
    """Each token several times, in a dimension of its own."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.shift = nn.Linear(make.width, make.width), parameter(2, make.width)
        self.form = make.random.randrange(3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.form == 0:
            rows = x.unsqueeze(2).expand(-1, -1, 2, -1) + self.shift
            return self.layer(rows).tanh().mean(2)
        if self.form == 1:
            rows = x.unsqueeze(0).repeat(2, 1, 1, 1) + self.shift[:, None, None]
            return self.layer(rows).tanh().mean(0)
        rows = x.repeat_interleave(2, dim=dim)  # every example twice, one after the other
        out = self.layer(rows).sin().unflatten(dim, (batch.examples, 2))
        return out.mean(dim + 1)


@operation("copies of the batch")
class Copies(Operation):
    """The whole batch twice, side by side: all examples, then all again."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.other = nn.Linear(make.width, make.width), nn.Linear(make.width, make.width)
        self.form = make.random.randrange(4)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        y = self.other(x).sin()
        if self.form == 0:
            first, second = self.layer(torch.cat([x, y], dim=dim)).tanh().chunk(2, dim=dim)
        elif self.form == 1:
            first, second = self.layer(torch.cat([x, y], dim=1 - dim)).tanh().chunk(2, dim=1 - dim)
        elif self.form == 2:
            first, second = self.layer(torch.stack([x, y], dim=dim)).tanh().unbind(dim)
        else:
            first, second = self.layer(torch.stack([x, y], dim=1 - dim)).tanh().unbind(1 - dim)
        return first - second * x


@operation("positions added")
class Positions(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.table, self.form = nn.Embedding(LONGEST, make.width), make.random.randrange(4)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        tokens = torch.arange(batch.tokens)
        if self.form == 0:
            return (x + self.table(tokens).unsqueeze(dim)).tanh()
        if self.form == 1:
            return (x + self.table.weight[: batch.tokens].unsqueeze(dim)).tanh()
        if self.form == 2:
            return (x * (1.0 + self.table(tokens.unsqueeze(dim).expand(x.shape[:2])))).tanh()
        return (x + self.table.weight[: batch.tokens].unsqueeze(dim).expand_as(x)).tanh()


@operation("words added")
class Words(Operation):
    """The embedding that other operations of the network may use too, here in the layout of the moment."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.words, self.is_padded = make.words(), make.chance(0.3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        words = batch.words if dim == 0 else batch.words.t()
        padding = 0 if self.is_padded else None
        return (x + F.embedding(words, self.words.weight, padding_idx=padding)).tanh()


@operation("tokens one by one")
class OneByOne(Operation):
    """A loop over time: one layer for all tokens, each after the other."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.is_stacked = nn.Linear(make.width, make.width), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.is_stacked:
            return torch.stack([self.layer(one).tanh() for one in x.unbind(1 - dim)], dim=1 - dim)
        return torch.cat([self.layer(one).tanh() for one in x.split(1, 1 - dim)], dim=1 - dim)


@operation("examples one by one")
class ExampleByExample(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.norm = nn.Linear(make.width, make.width), nn.LayerNorm(make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return torch.stack([self.norm(self.layer(one)) for one in x.unbind(dim)], dim=dim)
