"""Operations along time: recurrence, convolutions, norms over channels, sums."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.helpers.networks.batches import VOCABULARY, Batch
from tests.helpers.networks.operations import Make, Operation, operation, parameter

LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def recurrent(make: Make, batch_first: bool, kinds: tuple[str, ...] = ("LSTM", "GRU", "RNN")) -> nn.RNNBase:
    """Of some kind; both ways in some, with two layers in some."""
    both = make.chance(0.3)
    hidden = make.width // 2 if both else make.width
    layers = 2 if make.chance(0.2) else 1
    kind = LAYERS[make.random.choice(kinds)]
    return kind(make.width, hidden, layers, batch_first=batch_first, bidirectional=both)


@operation("recurrence, batch first", "batch")
class BatchFirst(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = recurrent(make, True)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.layer(x)[0]


@operation("recurrence, time first", "time")
class TimeFirst(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = recurrent(make, False)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.layer(x)[0]


@operation("bidirectional LSTM")
class Bidirectional(Operation):
    """In the layout of the moment."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.LSTM(make.width, make.width // 2, bidirectional=True)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        self.layer.batch_first = dim == 0
        return self.layer(x)[0]


@operation("packed recurrence")
class Packed(Operation):
    """Without the padding, sorted by torch or by hand."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.is_sorted = recurrent(make, False), make.chance(0.4)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        self.layer.batch_first = dim == 0
        lengths, tokens = batch.lengths, batch.tokens
        if not self.is_sorted:
            packed = pack_padded_sequence(x, lengths, dim == 0, enforce_sorted=False)
            return x + pad_packed_sequence(self.layer(packed)[0], dim == 0, 0.0, tokens)[0]
        order = lengths.argsort(descending=True)
        packed = pack_padded_sequence(x.index_select(dim, order), lengths[order], dim == 0)
        out = pad_packed_sequence(self.layer(packed)[0], dim == 0, 0.0, tokens)[0]
        return x + out.index_select(dim, order.argsort())


@operation("last state of a packed LSTM", "batch")
class PackedState(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.LSTM(make.width, make.width, batch_first=True)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        packed = pack_padded_sequence(x, batch.lengths, True, enforce_sorted=False)
        _, (state, _) = self.layer(packed)
        return x + state[-1].unsqueeze(1)


@operation("loop of cells")
class Cells(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.is_lstm = make.chance()
        self.cell = (nn.LSTMCell if self.is_lstm else nn.GRUCell)(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        hidden = memory = x.new_zeros(batch.examples, self.width)
        found = []
        for one in x.unbind(1 - dim):
            if self.is_lstm:
                hidden, memory = self.cell(one, (hidden, memory))
            else:
                hidden = self.cell(one, hidden)
            found.append(hidden)
        return torch.stack(found, dim=1 - dim)


@operation("conv1d", "batch")
class Conv1d(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        groups, padding = make.random.choice([1, 2, make.width]), make.random.choice([1, "same"])
        self.layer = nn.Conv1d(make.width, make.width, 3, padding=padding, groups=groups)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + self.layer(x.transpose(1, 2)).transpose(1, 2).tanh()


@operation("conv2d", "batch")
class Conv2d(Operation):
    """Over time and features."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.there, self.back = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 1, (1, 3), padding=(0, 1))

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return self.back(self.there(x.unsqueeze(1)).relu()).squeeze(1)


@operation("transposed convolution", "batch")
class ConvTranspose(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.ConvTranspose1d(make.width, make.width, 3, padding=1)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + self.layer(x.permute(0, 2, 1)).permute(0, 2, 1)


@operation("group norm", "batch")
class GroupNorm(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.norm, self.is_plain = nn.GroupNorm(2, make.width), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.is_plain:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(x.reshape(-1, self.width)).view(x.shape)


@operation("cumulative sum")
class CumulativeSum(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.is_last = nn.Linear(make.width, make.width), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.is_last:
            return self.layer(x.cumsum(1 - dim)).tanh()
        return self.layer(x).tanh().cumsum(1 - dim)


@operation("unfolded windows")
class Windows(Operation):
    """Two tokens next to each other, of which a linear layer makes one."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.Linear(2 * make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        before = x.narrow(1 - dim, 0, 1)
        windows = torch.cat([before, x], dim=1 - dim).unfold(1 - dim, 2, 1)  # (·, ·, d, 2)
        return self.layer(windows.flatten(2)).tanh()


@operation("pooling along time", "batch")
class Pooling(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer, self.is_largest = nn.Linear(make.width, make.width), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        pool = F.max_pool1d if self.is_largest else F.avg_pool1d
        return x + pool(self.layer(x).transpose(1, 2), 3, 1, 1).transpose(1, 2)


@operation("gate from the mean")
class Gate(Operation):
    """A gate for each example, from the mean of its tokens."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x * self.layer(x.mean(1 - dim)).sigmoid().unsqueeze(1 - dim)


@operation("weights along time")
class AlongTime(Operation):
    """Tokens are mixed by a matrix, as many of its rows and columns as there are tokens."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.weight = parameter(9, 9)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        weight = self.weight[: batch.tokens, : batch.tokens]
        return x + F.linear(x.movedim(1 - dim, 2), weight).movedim(2, 1 - dim).tanh()


@operation("weights made by the example", "batch")
class OwnWeights(Operation):
    """A matrix for each example, made by a linear layer."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.layer = nn.Linear(make.width, make.width**2)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        weights = self.layer(x.mean(1)).view(-1, self.width, self.width)
        return torch.bmm(x, weights.tanh())


@operation("embedding bag")
class Bag(Operation):
    """Of the example's words, with offsets in some."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        mode = make.random.choice(["mean", "sum"])
        self.bag, self.is_flat = nn.EmbeddingBag(VOCABULARY, make.width, mode=mode), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.is_flat:
            found = self.bag(batch.words[batch.mask], batch.lengths.cumsum(0) - batch.lengths)
        else:
            found = self.bag(batch.words)
        return x + found.unsqueeze(1 - dim)


@operation("first token of its own")
class Prefix(Operation):
    """A learned token before all others, which sees them through a norm and a sum, and is dropped again."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.token, self.layer = parameter(1, 1, make.width), nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        shape = [batch.examples if place == dim else 1 for place in range(2)]
        x = torch.cat([self.token.expand(*shape, -1), x], dim=1 - dim)
        return self.layer(x).tanh().cumsum(1 - dim).narrow(1 - dim, 1, batch.tokens)
