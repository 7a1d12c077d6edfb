"""Every batch is read anew: what earlier ones looked like is never taken for a rule."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.batch import compute_batch
from edpsgd.per_example.layout import make_units
from tests.helpers.unit_loop import Fast, check, check_uncompared, trained


class Shared(nn.Module):
    """Distinct rows are looked at once, and their features put wherever they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)[place].tanh().sum((1, 2))


def test_shared_rows_are_noticed_even_if_the_first_batches_share_nothing() -> None:
    """The shapes are those of rows that lie example by example, in all batches."""
    torch.manual_seed(0)
    model = Shared()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for place in [[[0, 1], [2, 3]]] * 4 + [[[0, 2], [2, 3]], [[3, 2], [1, 1]]]:
            check(engine, model, model(torch.randn(4, 3), torch.tensor(place)))


def test_rows_are_looked_at_when_their_gradient_is_no_longer_zero() -> None:
    """As in low-rank adapters, which begin with a zero matrix: the rows are seen to be mixed in the third batch."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"below": nn.Linear(3, 3), "above": nn.Linear(3, 2)})
    nn.init.zeros_(model["above"].weight)
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number in range(3):
            hidden = model["below"](torch.randn(4, 3)).tanh()
            check(engine, model, model["above"](hidden - hidden.mean(0)).exp().sum(1))
            if number == 1:
                nn.init.normal_(model["above"].weight)


def test_examples_of_other_lengths_are_noticed_even_if_all_were_alike_at_first() -> None:
    """Four rows of two examples each time, put together without padding; the third batch has one of length 1."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    engine = UnitGradients(trained(layer))
    for lengths in ([2, 2], [2, 2], [3, 1], [1, 3], [2, 2]):
        rows = torch.cat([torch.randn(length, 3) for length in lengths])
        losses = torch.stack([part.square().sum() for part in layer(rows).split(lengths)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            check(engine, layer, losses)


class Parts(nn.Module):
    """Layers that see some examples of a batch only, which ones the data say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.below, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        hidden = self.below(x).tanh()
        outer = torch.cat([hidden[:begin], hidden[end:]])
        inner, outer = self.first(hidden[begin:end]), self.second(outer)
        return torch.cat([outer[:begin], inner, outer[begin:]]).square().sum(1)


@pytest.mark.parametrize(
    "parts", [[(0, 1), (0, 1), (2, 3)], [(0, 2), (0, 2), (0, 3)], [(0, 2), (0, 2), (2, 4)], [(1, 3), (0, 2), (0, 1)]]
)
def test_layers_that_see_other_examples_in_every_batch(parts) -> None:
    """The third batch is not due for a check: what the first two had in common must not be taken for a rule."""
    model = Parts()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number, (begin, end) in enumerate(parts):
            check(engine, model, model(torch.randn(4, 4, generator=torch.Generator().manual_seed(number)), begin, end))


class Labels(nn.Module):
    """Scores against an embedding of each of three labels, which all examples share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.labels, self.below, self.up = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x).tanh() @ self.below(self.labels(torch.arange(3))).tanh().T).square().sum(1)


def test_a_batch_of_one_teaches_nothing() -> None:
    """In it, all rows belong to the one example; and three labels are not the three examples of a later batch."""
    model = Labels()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number, examples in enumerate((1, 1, 3, 1, 3, 2, 3)):
            check(engine, model, model(torch.randn(examples, 5, generator=torch.Generator().manual_seed(number))))


class LastStep(nn.Module):
    """Time comes first, and the state of each sequence's last step is picked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below, self.up = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        hidden = self.below(x).tanh()
        return self.up(hidden[last, torch.arange(x.shape[1])]).square().sum(1)


def test_as_many_steps_as_examples() -> None:
    model = LastStep()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number, last in enumerate(([0, 1, 2], [0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 1, 0])):
            x = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(number))
            check(engine, model, model(x, torch.tensor(last)))


class Reordered(nn.Module):
    """Puts the examples into another order, and the losses back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, 4), nn.Linear(4, 2), how

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        moved = self._moved(self.first(x).tanh(), order)
        losses = self.second(moved).square().sum(1)
        if self.how == "matrix":
            return torch.eye(len(x))[order].T @ losses
        return torch.stack([losses[order.index(place)] for place in range(len(order))])

    def _moved(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        if self.how == "stack":
            return torch.stack([x[place] for place in order])
        if self.how == "cat":
            return torch.cat([x[place : place + 1] for place in order])
        if self.how == "unbind":
            rows = x.unbind(0)
            return torch.stack([rows[place] for place in order])
        if self.how == "copy":
            copied = torch.zeros_like(x)
            for place, origin in enumerate(order):
                copied[place] = x[origin]
            return copied
        if self.how == "flip":
            return x.flip(0) if order[0] else x
        return torch.eye(len(x))[order] @ x


@pytest.mark.parametrize("how", ["stack", "cat", "unbind", "copy", "flip"])
def test_examples_that_change_places_in_later_batches_only(how: str) -> None:
    """No batch is trained on before somebody looked at what is new in it."""
    torch.manual_seed(0)
    model = Reordered(how)
    engine = UnitGradients(trained(model))
    for _ in range(4):
        check(engine, model, model(torch.randn(4, 4), [0, 1, 2, 3]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for order in ([3, 2, 1, 0],) if how == "flip" else ([2, 0, 3, 1], [0, 1, 2, 3], [1, 0, 3, 2]):
            check(engine, model, model(torch.randn(4, 4), order))


def test_rows_that_are_split_otherwise_in_later_batches_only() -> None:
    """As many rows in all, but not of the same examples."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def losses(*lengths: int) -> torch.Tensor:
        rows = model(torch.randn(sum(lengths), 4)).tanh()
        return torch.stack([part.mean(0).square().sum() for part in rows.split(list(lengths))])

    engine = UnitGradients(trained(model))
    for _ in range(2):
        check(engine, model, losses(3, 3))
    with Fast():
        check(engine, model, losses(5, 1))
        check(engine, model, losses(1, 5))


def test_a_matrix_of_the_data_that_moves_examples_is_followed() -> None:
    """All graphs are the same; only the numbers tell."""
    torch.manual_seed(0)
    model = Reordered("matrix")
    engine = UnitGradients(trained(model))
    with Fast():
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 3, 1], [1, 0, 2, 3]):
            check(engine, model, model(torch.randn(4, 4), order))


def test_rows_that_are_written_to_other_places_are_noticed(monkeypatch) -> None:
    """Autograd does not say where they go, so that every such batch is compared with it."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            y, back = self.first(x[torch.tensor(order)]).tanh(), torch.zeros(len(x), 8)
            for row, place in enumerate(order):
                back[place] = y[row]
            return self.out(back).squeeze(1)

    monkeypatch.setattr("edpsgd.per_example.engine.secrets.randbelow", lambda _: 1)  # no check at random
    torch.manual_seed(0)
    model = Sorted()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 2, 0], [1, 0, 3, 2], [2, 3, 0, 1]):
            check(engine, model, model(torch.randn(4, 6), order))


class Checkpointed(nn.Module):
    """The first layer frozen or not; a checkpoint within another one, or a layer beside it."""

    def __init__(self, how: str, is_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.how, self.is_reentrant = how, is_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.clone().requires_grad_() if self.how == "alone" else self.first(inputs)
        again = checkpoint(self._inside, hidden, use_reentrant=self.is_reentrant)
        if self.how == "beside":
            again = again + self.inner(hidden)
        return self.last(again).square().sum(1)

    def _inside(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.how == "nested":
            return checkpoint(self.inner, hidden, use_reentrant=not self.is_reentrant).tanh()
        return self.inner(hidden).tanh()


@pytest.mark.parametrize("how", ["alone", "below", "beside", "nested"])
def test_reentrant_checkpoints_are_refused(how: str) -> None:
    """They hide their parameters, which would get a gradient of zero without a word."""
    torch.manual_seed(0)
    model = Checkpointed(how, is_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        UnitGradients(trained(model)).backward(model(torch.randn(5, 4)))


@pytest.mark.parametrize("how", ["alone", "below", "beside"])
def test_other_checkpoints_change_nothing(how: str) -> None:
    torch.manual_seed(0)
    model = Checkpointed(how, is_reentrant=False)
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            check(engine, model, model(torch.randn(5, 4)))


def test_a_reentrant_checkpoint_within_another_one_is_refused() -> None:
    model = Checkpointed("nested", is_reentrant=False)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        UnitGradients(trained(model)).backward(model(torch.randn(5, 4)))


def test_what_is_known_of_a_batch() -> None:
    layer = nn.Linear(3, 2)
    losses = layer(torch.randn(4, 3)).square().sum(1)
    units = make_units(losses, None, None)
    common = (dict(layer.named_parameters()), losses, torch.ones(4), units)
    batch = compute_batch(*common, set(), set(), False)
    assert batch.is_new
    assert batch.is_compared
    assert "AddmmBackward0" in batch.kinds
    assert not batch.may_spread
    assert not batch.has_halves
    assert not batch.shared
    assert not batch.without_rule
    assert list(batch.layers) == [0, 1]
    distrusted = compute_batch(*common, {"weight"}, batch.kinds, True)
    assert not distrusted.is_new
    assert distrusted.is_compared
    assert distrusted.may_spread
    assert list(distrusted.fallbacks[0].parameters) == [0]
    last = compute_batch(*common, set(), batch.kinds, False)
    assert not last.is_compared  # so that the graph is freed
    with pytest.raises(RuntimeError, match="a second time|already been freed"):
        losses.sum().backward()


@pytest.mark.parametrize("combine", [torch.add, torch.mul])
@pytest.mark.parametrize("examples", [1, 3])
def test_parameters_of_one_operation_that_are_broadcast_along_others(combine, examples: int) -> None:
    """The operation belongs to one example, and each parameter looks at it along another dimension."""
    torch.manual_seed(0)
    parameters = {"column": nn.Parameter(torch.randn(3, 1)), "row": nn.Parameter(torch.randn(1, 3))}
    found = []
    for x in torch.randn(examples, 3, 3):
        found.append((combine(*parameters.values()) * x).square().sum())
    check_uncompared(parameters, torch.stack(found))
