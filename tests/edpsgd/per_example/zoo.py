"""Models and data that several tests of the engine use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import edpsgd
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.rules import lstm
from tests.helpers.small_models import Said

WIDTH = 5


class Sequences:
    """Random vectors, lengths and numbers for a batch."""

    def __init__(self, examples: int, steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(examples, steps, WIDTH, generator=generator)
        self.lengths = torch.randint(1, steps + 1, (examples,), generator=generator)
        self.lengths[examples // 2] = steps
        self.mask = torch.arange(steps) < self.lengths[:, None]
        self.numbers = torch.randint(0, 7, (examples, steps), generator=generator)
        self.letters = torch.randint(0, 7, (examples, steps, 6), generator=generator)


class Model(nn.Module):
    """Parts and a function of them that gives one loss for each example."""

    def __init__(self, losses: Callable[..., torch.Tensor], **parts: nn.Module | torch.Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
        self._losses = losses

    def forward(self, data: Sequences) -> torch.Tensor:
        return self._losses(self, data)


def total(values: torch.Tensor) -> torch.Tensor:
    """A loss of each example that is not linear in what it is given."""
    return values.flatten(1).square().sum(1) + values.flatten(1).sin().sum(1)


def packed(model: Model, data: Sequences, batch_first: bool = True, **options: bool) -> torch.Tensor:
    x = data.x if batch_first else data.x.transpose(0, 1)
    sequence = pack_padded_sequence(x, data.lengths, batch_first=batch_first, enforce_sorted=False)
    outputs = pad_packed_sequence(model.part(sequence)[0], batch_first=batch_first)[0]
    return total(outputs if batch_first else outputs.transpose(0, 1))


def sorted_packed(model: Model, data: Sequences) -> torch.Tensor:
    lengths = data.lengths.sort(descending=True).values
    sequence = pack_padded_sequence(model.first(data.x), lengths, batch_first=True)
    return total(pad_packed_sequence(model.part(sequence)[0], batch_first=True)[0])


def last_states(model: Model, data: Sequences) -> torch.Tensor:
    sequence = pack_padded_sequence(model.first(data.x), data.lengths, batch_first=True, enforce_sorted=False)
    states, cells = model.part(sequence)[1]
    return total(states.transpose(0, 1)) + total(cells[-1])


def linear_on_packed(model: Model, data: Sequences) -> torch.Tensor:
    sequence = pack_padded_sequence(data.x, data.lengths, batch_first=True, enforce_sorted=False)
    outputs = model.part(sequence)[0]
    outputs = outputs._replace(data=model.above(outputs.data))
    return total(pad_packed_sequence(outputs, batch_first=True)[0])


def padded(model: Model, data: Sequences) -> torch.Tensor:
    outputs, _ = model.part(model.first(data.x))
    return total(outputs * data.mask.unsqueeze(2))


def around(model: Model, data: Sequences) -> torch.Tensor:
    """Some of what the layer reads goes to the loss without it."""
    x = model.first(data.x)
    return total(torch.cat([x, model.part(x)[0]], dim=2) * data.mask.unsqueeze(2))


def time_first(model: Model, data: Sequences) -> torch.Tensor:
    outputs, states = model.part(model.first(data.x.transpose(0, 1)))
    last = states[0] if isinstance(states, tuple) else states
    return total(outputs.transpose(0, 1)) + total(last.transpose(0, 1))


def cell(model: Model, data: Sequences) -> torch.Tensor:
    state = None
    for step in range(data.x.shape[1]):
        state = model.part(data.x[:, step], state)
    return total(state[0] if isinstance(state, tuple) else state)


def characters(model: Model, data: Sequences) -> torch.Tensor:
    """A CNN over the letters of each token: examples x tokens in one dimension."""
    letters = model.table(data.letters.flatten(0, 1)).transpose(1, 2)
    words = torch.relu(model.convolution(letters)).max(dim=2).values
    return total(words.view(len(data.x), data.x.shape[1], -1))


def image(model: Model, data: Sequences) -> torch.Tensor:
    return total(model.part(data.x.unsqueeze(1)))


def tokens_first(model: Model, data: Sequences) -> torch.Tensor:
    """Steps x examples in one dimension."""
    examples, steps = data.mask.shape
    flat = model.norm(model.first(data.x.transpose(0, 1).reshape(-1, WIDTH)).tanh())
    return total(model.above(flat).view(steps, examples, -1).transpose(0, 1))


def twice(model: Model, data: Sequences) -> torch.Tensor:
    """The same layer on steps and, after that, on their mean."""
    hidden = model.part(data.x).tanh()
    return total(model.part(hidden.mean(1))) + total(hidden)


def tied(model: Model, data: Sequences) -> torch.Tensor:
    hidden = model.part(model.table(data.numbers))[0]
    scores = hidden @ model.table.weight.T
    return nn.functional.cross_entropy(scores.transpose(1, 2), data.numbers.roll(-1, 1), reduction="none").sum(1)


def loose(model: Model, data: Sequences) -> torch.Tensor:
    examples = len(data.x)
    x = (data.x @ model.weight).tanh() * model.scale - model.shift
    x = torch.cat([model.begin.expand(examples, 1, WIDTH), x], 1)
    return total(x) + total(model.table[data.numbers, data.numbers.flip(1)] + model.single)


def positions(model: Model, data: Sequences) -> torch.Tensor:
    """Embeddings of shape (1, steps, width) are spread over the examples."""
    places = torch.arange(data.x.shape[1]).unsqueeze(0)
    return total((model.table(data.numbers) + model.places(places)).tanh())


def last_step(model: Model, data: Sequences) -> torch.Tensor:
    hidden = model.first(data.x).tanh()
    chosen = hidden[torch.arange(len(hidden)), data.lengths - 1]
    return total(model.above(chosen)) + total(hidden.gather(1, data.numbers.clamp(max=0).unsqueeze(2)))


def sorted_by_the_model(model: Model, data: Sequences) -> torch.Tensor:
    order = data.lengths.argsort()
    hidden = model.above(model.first(data.x)[order].tanh())
    return total(hidden[order.argsort()])


def attention(model: Model, data: Sequences) -> torch.Tensor:
    return total(model.part(data.x, src_key_padding_mask=~data.mask) * data.mask.unsqueeze(2))


def pair() -> dict[str, nn.Module]:
    return {"first": nn.Linear(WIDTH, WIDTH), "above": nn.Linear(WIDTH, 3)}


def recurrent(kind: type[nn.RNNBase], first: bool = True, **options: object) -> dict[str, nn.Module]:
    parts: dict[str, nn.Module] = {"first": nn.Linear(WIDTH, WIDTH)} if first else {}
    return {**parts, "part": kind(WIDTH, 4, **options)}


ZOO: dict[str, Callable[[], Model]] = {
    "LSTM, packed": lambda: Model(packed, **recurrent(nn.LSTM, False, batch_first=True)),
    "LSTM, packed, time first": lambda: Model(
        lambda m, d: packed(m, d, batch_first=False), **recurrent(nn.LSTM, False, num_layers=2)
    ),
    "LSTM, packed, both ways, 2 layers": lambda: Model(
        packed, **recurrent(nn.LSTM, False, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
    ),
    "LSTM, packed, sorted": lambda: Model(sorted_packed, **recurrent(nn.LSTM, bidirectional=True, batch_first=True)),
    "LSTM, packed, last states": lambda: Model(last_states, **recurrent(nn.LSTM, batch_first=True, num_layers=2)),
    "LSTM, packed, narrow": lambda: Model(packed, **recurrent(nn.LSTM, False, batch_first=True, proj_size=2)),
    "linear on packed": lambda: Model(
        linear_on_packed, above=nn.Linear(4, 3), **recurrent(nn.LSTM, False, batch_first=True)
    ),
    "LSTM, padded, both ways, 2 layers": lambda: Model(
        padded, **recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
    ),
    "LSTM, padded, no bias": lambda: Model(padded, **recurrent(nn.LSTM, batch_first=True, bias=False)),
    "LSTM, padded, 2 layers": lambda: Model(padded, **recurrent(nn.LSTM, num_layers=2, batch_first=True)),
    "LSTM, of the data": lambda: Model(
        lambda m, d: total(m.part(d.x)[0] * d.mask.unsqueeze(2)), **recurrent(nn.LSTM, False, batch_first=True)
    ),
    "LSTM, way around it": lambda: Model(around, **recurrent(nn.LSTM, batch_first=True, bidirectional=True)),
    "LSTM, time first": lambda: Model(time_first, **recurrent(nn.LSTM, bidirectional=True)),
    "GRU, packed, both ways, 2 layers": lambda: Model(
        packed, **recurrent(nn.GRU, False, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
    ),
    "GRU, padded": lambda: Model(padded, **recurrent(nn.GRU, batch_first=True, bidirectional=True)),
    "GRU, time first": lambda: Model(time_first, **recurrent(nn.GRU, num_layers=2)),
    "RNN, padded": lambda: Model(padded, **recurrent(nn.RNN, batch_first=True)),
    "LSTM cell": lambda: Model(cell, part=nn.LSTMCell(WIDTH, 4)),
    "GRU cell": lambda: Model(cell, part=nn.GRUCell(WIDTH, 4)),
    "characters": lambda: Model(
        characters, table=nn.Embedding(7, 3, padding_idx=0), convolution=nn.Conv1d(3, 4, 3, padding=1)
    ),
    "characters, strided": lambda: Model(
        characters, table=nn.Embedding(7, 3), convolution=nn.Conv1d(3, 4, 2, stride=2, dilation=3, padding=2)
    ),
    "image": lambda: Model(image, part=nn.Conv2d(1, 3, (2, 3), padding=1)),
    "tokens first": lambda: Model(tokens_first, norm=nn.LayerNorm(WIDTH), **pair()),
    "twice": lambda: Model(twice, part=nn.Linear(WIDTH, WIDTH)),
    "tied": lambda: Model(tied, table=nn.Embedding(7, WIDTH), part=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "loose": lambda: Model(
        loose,
        weight=torch.randn(WIDTH, WIDTH),
        scale=torch.randn(WIDTH),
        shift=torch.randn(1, 1, WIDTH),
        begin=torch.randn(1, 1, WIDTH),
        table=torch.randn(7, 7),
        single=torch.randn(()),
    ),
    "positions": lambda: Model(positions, table=nn.Embedding(7, WIDTH), places=nn.Embedding(20, WIDTH)),
    "last step": lambda: Model(last_step, **pair()),
    "sorted by the model": lambda: Model(sorted_by_the_model, **pair()),
    "attention": lambda: Model(attention, part=nn.TransformerEncoderLayer(WIDTH, 1, 8, dropout=0.2, batch_first=True)),
}


def made(name: str) -> Model:
    torch.manual_seed(0)
    return ZOO[name]()


SIZES = [(10, 13), (14, 11), (9, 15), (12, 10), (16, 14), (12, 12), (7, 7), (1, 1), (1, 6), (6, 1)]


class Reordering(torch.autograd.Function):
    """Rows in an order that no graph tells."""

    @staticmethod
    def forward(context, rows, order):
        context.order = order
        return rows[order]

    @staticmethod
    def backward(context, gradient):
        back = torch.zeros_like(gradient)
        back[context.order] = gradient
        return back, None


def optimizer_of(model: nn.Module, verify: str = "spot", clipping: str = "flat") -> edpsgd.PrivateOptimizer:
    return edpsgd.PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        clip_norm=1.0,
        noise_multiplier=0.0,
        clipping=clipping,
        unit="example",
        divisor=4.0,
        verify=verify,
        collective="local",
    )


def lstm_layers(losses: torch.Tensor) -> list[Node]:
    nodes = [node for node in read_graph(losses).nodes if node.name() == lstm.NAME]
    if not nodes:
        pytest.skip("torch does not run LSTM layers with oneDNN here")
    return nodes


SAID = [
    Said([0, 1, 2], [0, 1, 2], 1),
    Said([0, 2], [1, 1], 2),
    Said([3, 4, 5, 6], [1, 1, 0, 2], 0),
    Said([7], [1], 3),
    Said([2, 2, 8, 1], [0, 0, 1, 2], 1),
    Said([6, 0], [2, 1], 0),
    Said([1, 1, 1], [0, 0, 0], 2),
    Said([5, 3, 0], [1, 2, 0], 2),
]
