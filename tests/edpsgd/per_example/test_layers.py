"""Ordinary ways to write, store and run layers: convolutions, memory formats, precisions, checkpoints."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from edpsgd.per_example import UnitGradients, rules
from tests.helpers.common import private
from tests.helpers.unit_loop import Fast, check, trained

SIZES = {1: (11,), 2: (9, 8)}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d}


def check_convolution(layer: nn.Module, spatial: tuple[int, ...]) -> None:
    engine = UnitGradients(trained(layer))
    for examples in (6, 4):
        inputs = torch.randn(examples, 4, *spatial)
        check(engine, layer, layer(inputs).flatten(1).square().sum(1))


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", ["valid", "same", 1])
def test_convolutions(dims: int, stride: int, dilation: int, padding: str | int) -> None:
    if padding == "same" and stride > 1:
        stride = 1  # torch has no others
    torch.manual_seed(0)
    for channels in (6, 64):
        layer = CONVOLUTIONS[dims](4, channels, 3, stride=stride, dilation=dilation, padding=padding)
        with Fast():
            check_convolution(layer, SIZES[dims])


@pytest.mark.filterwarnings("ignore:gradients for .* are computed unit by unit")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, groups=2, padding="valid"),
        nn.Conv1d(4, 8, 2, groups=4, padding="same"),
        nn.ConvTranspose1d(4, 6, 3, stride=2),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"),
    ],
    ids=lambda layer: str(layer),
)
def test_other_convolutions(layer: nn.Module) -> None:
    torch.manual_seed(0)
    check_convolution(layer, SIZES[1] if "1d" in type(layer).__name__ else SIZES[2])


def channels_last() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, padding="valid"))
    inputs = torch.randn(5, 3, 8, 8).to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), inputs


def turned() -> tuple[nn.Module, torch.Tensor]:
    """A parameter that is the transposed view of another tensor, and one with gaps."""
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.randn(3, 4).T)
    model.bias = nn.Parameter(torch.randn(8)[::2])
    return model, torch.randn(5, 3)


@pytest.mark.parametrize("made", [channels_last, turned])
def test_parameters_that_are_not_contiguous(made) -> None:
    torch.manual_seed(0)
    model, inputs = made()
    assert not all(parameter.is_contiguous() for parameter in model.parameters())
    engine = UnitGradients(trained(model))
    for _ in range(2):
        check(engine, model, model(inputs).flatten(1).square().sum(1))
    sums = [torch.zeros_like(parameter, requires_grad=False) for parameter in model.parameters()]  # not contiguous
    expected = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    engine.backward(model(inputs).flatten(1).square().sum(1))
    engine.add_weighted_(sums, torch.ones(5))
    torch.testing.assert_close(sums, list(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", [channels_last, turned])
def test_steps_with_parameters_that_are_not_contiguous(made) -> None:
    """backward(losses) and accumulate() move the model alike, by the clipped gradients."""
    torch.manual_seed(0)
    model, inputs = made()
    before, moved = [p.detach().clone() for p in model.parameters()], []
    for is_by_hand in (True, False):
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.data.copy_(value)
            parameter.grad = None
        optimizer = private(model, clip_norm=0.5, noise_multiplier=0.0, unit="example", divisor=5)
        if is_by_hand:
            for one in inputs.unbind():
                model(one.unsqueeze(0)).square().sum().backward()
                optimizer.accumulate()
        else:
            optimizer.backward(model(inputs).flatten(1).square().sum(1))
        optimizer.step()
        moved.append([p.detach() - value for p, value in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-5)
    assert 0.0 < float(torch.cat([one.flatten() for one in moved[0]]).norm()) <= 0.5


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(50, 48), kind(48, 48, batch_first=True), nn.Linear(48, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.words(words))[0])


class Tied(nn.Module):
    """Autograd adds up the gradients of layers that are used many times in the precision of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.norm = nn.Embedding(50, 48), nn.Linear(48, 48), nn.LayerNorm(48)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for _ in range(6):
            hidden = self.norm(hidden + self.layer(hidden).tanh())
        return hidden @ self.words.weight.T


def small_half_model(kind: str) -> nn.Module:
    if kind == "transformer":
        layer = nn.TransformerEncoderLayer(48, 4, 128, batch_first=True, dropout=0.0)
        return nn.Sequential(nn.Embedding(50, 48), layer, nn.Linear(48, 5))
    if kind == "mlp":
        return nn.Sequential(nn.Embedding(50, 48), nn.Linear(48, 256), nn.GELU(), nn.Linear(256, 5))
    return Tied() if kind == "tied" else Recurrent(nn.GRU)


@pytest.mark.parametrize("kind", ["mlp", "gru", "tied", "transformer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_no_false_alarm_in_half_precision(kind: str, dtype: torch.dtype, size: float) -> None:
    """Weights of half precision without a scaler: gradients fall below the range, in which autograd is no judge."""
    torch.manual_seed(1)
    model = small_half_model(kind).to(dtype)
    engine = UnitGradients(trained(model), verifies_all=True)
    with Fast():
        for step in range(9):
            words = torch.randint(0, 50, ((8, 5, 16)[step % 3], (7, 12, 16)[step // 3]))
            assert bool(torch.isfinite(engine.backward(size * model(words).float().square().mean((1, 2)))).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_wrong_rule_is_found_out_in_half_precision(dtype: torch.dtype, size: float, monkeypatch) -> None:
    """What autograd rounds away is no excuse for everything: one example too many is seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)
    plain, fits = rules.RULES["AddmmBackward0"]

    def swapped(use, received, layer):
        mixed = received.gradient.roll(1, 0)
        plain(use, rules.Received([mixed], received.layout, received.units), layer)

    monkeypatch.setitem(rules.RULES, "AddmmBackward0", (swapped, fits))
    engine = UnitGradients(trained(model))
    with pytest.warns(RuntimeWarning, match="do not agree with autograd"):
        engine.backward(size * model(torch.randn(6, 8).to(dtype)).float().square().mean(1))


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
