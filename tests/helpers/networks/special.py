"""Parameters in unusual forms and places, and examples of other lengths without padding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.networks.batches import Batch
from tests.helpers.networks.operations import Make, Operation, mask_of, operation, parameter


@operation("scalar parameters")
class Scalars(Operation):
    """A parameter without dimensions, and a mixture of layers by a few numbers."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.gain, self.shares = parameter(mean=1.0), parameter(2)
        self.layer = nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        shares = self.shares.softmax(0)
        return self.gain * (shares[0] * x + shares[1] * self.layer(x).tanh())


@operation("PReLU")
class LeakyByParameter(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.prelu = nn.Linear(make.width, make.width), nn.PReLU()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.prelu(self.layer(x))


@operation("learned padding")
class LearnedPadding(Operation):
    """A learned token stands where there is padding."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.token, self.form = parameter(make.width), make.random.randrange(2)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        mask = mask_of(batch, dim)
        if self.form == 0:
            return torch.where(mask, x, self.token)
        out = x.clone()
        out[~mask.squeeze(2)] = self.token
        return out


@operation("frozen and trained layers")
class Frozen(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.frozen, self.layer = nn.Linear(make.width, make.width), nn.Linear(make.width, make.width)
        self.frozen.weight.requires_grad_(False)  # its bias is trained
        self.layer.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + self.layer(self.frozen(x).tanh())


@operation("adapter that begins at zero")
class Adapter(Operation):
    """The gradient of its first matrix is zero until the second one has been trained."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.down, self.up = parameter(2, make.width), nn.Parameter(torch.zeros(make.width, 2))
        self.up.begins_at_zero = True

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + F.linear(F.linear(x, self.down), self.up)


@operation("weight that is not contiguous")
class NotContiguous(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.weight = nn.Parameter(0.5 * torch.randn(make.width, make.width).t())

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return F.linear(x, self.weight).tanh()


@operation("conv2d of other forms", "batch")
class OtherConv2d(Operation):
    """Padding by name, channels last, features as channels."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        groups = make.random.choice([1, 2])
        self.layer = nn.Conv2d(make.width, make.width, (3, 1), padding="same", groups=groups)
        self.narrow = nn.Conv2d(make.width, make.width, 1, padding="valid", bias=False)
        if groups == 1:  # with groups, torch itself makes a wrong gradient of such weights in double precision
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        image = x.transpose(1, 2).unsqueeze(3)  # (B, d, T, 1)
        return x + self.narrow(self.layer(image).relu()).squeeze(3).transpose(1, 2)


@operation("instance norm", "batch")
class InstanceNorm(Operation):
    """Statistics of each example of its own; a single token would have none, so the input is there twice."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.norm = nn.InstanceNorm1d(make.width, affine=True)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        twice = torch.cat([x, x.sin() + 0.5], dim=1)
        return x + self.norm(twice.transpose(1, 2)).transpose(1, 2)[:, : batch.tokens]


@operation("Fourier transform along time")
class Fourier(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + torch.fft.fft(self.layer(x), dim=1 - dim).real


@operation("largest of several")
class Maxout(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.Linear(make.width, 2 * make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.layer(x).unflatten(-1, (-1, 2)).amax(-1)


@operation("ragged rows")
class Ragged(Operation):
    """Rows without padding, one example after the other; a summary of each goes back to its rows."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.summary = nn.Linear(make.width, make.width), nn.Linear(make.width, make.width)
        self.form = make.random.randrange(2)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        x = x if dim == 0 else x.transpose(0, 1)
        rows, lengths = self.layer(x[batch.mask]).tanh(), batch.lengths.tolist()
        summary = self.summary(torch.stack([part.mean(0) for part in rows.split(lengths)]))
        if self.form == 0:
            rows = rows + summary.repeat_interleave(batch.lengths, dim=0)
        else:
            rows = torch.cat([part + one for part, one in zip(rows.split(lengths), summary, strict=True)])
        out = torch.zeros_like(x)
        out[batch.mask] = rows
        return out if dim == 0 else out.transpose(0, 1)


@operation("sum with a broadcast weight")
class Broadcast(Operation):
    """Forms of adding and scaling that have an operation of their own."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.bias, self.gain = parameter(1, 1, make.width), parameter(1, make.width, mean=1.0)
        self.form = make.random.randrange(4)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.form == 0:
            return torch.addcmul(self.bias, x, self.gain)
        if self.form == 1:
            return torch.lerp(self.bias.expand_as(x), x, self.gain)
        if self.form == 2:
            return x / (1.0 + self.gain.square()) - self.bias
        return torch.sub(self.bias, x, alpha=2.0) * self.gain.exp()


@operation("product with all labels")
class LabelWeights(Operation):
    """A dimension of labels, which comes first in some: outer products with a parameter, and their mean."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.labels = parameter(make.random.choice([2, 3, 4]), make.width)
        self.layer, self.is_first = nn.Linear(make.width, make.width), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.is_first:
            return self.layer(x.unsqueeze(0) * self.labels[:, None, None]).tanh().mean(0)
        return self.layer(x.unsqueeze(2) * self.labels).tanh().mean(2)


@operation("layers in a batch of matrices")
class ManyLayers(Operation):
    """Two linear layers as one parameter, and one product of matrices for both."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.weights, self.form = parameter(2, make.width, make.width), make.random.randrange(3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.form == 0:
            return torch.einsum("abi,kij->abj", x, self.weights).tanh()
        if self.form == 1:
            rows = x.reshape(-1, self.width).expand(2, -1, -1)
            return torch.bmm(rows, self.weights).sum(0).view(x.shape).tanh()
        return torch.matmul(x.unsqueeze(1), self.weights).mean(1).tanh()


@operation("one layer for two inputs")
class Siamese(Operation):
    """The same layers on the batch in both layouts and on its mean, apart from each other."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.norm = nn.Linear(make.width, make.width), nn.LayerNorm(make.width)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x).tanh())

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        mean = self.encode(x.mean(1 - dim)).unsqueeze(1 - dim)
        return self.encode(x) + self.encode(x.transpose(0, 1).cos()).transpose(0, 1) * mean
