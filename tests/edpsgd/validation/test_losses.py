"""check_losses: losses that depend on other examples are refused, others are not, and nothing is changed by it."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import edpsgd
from models.bert import BERT, BertInputs
from models.language_model import NO_TARGET, LanguageModel
from tests.helpers import small_models
from tests.helpers.common import private
from tests.helpers.mixing_models import MIXING
from tests.helpers.padded_models import Model, some_examples
from tests.helpers.small_models import INTENTS, TAGS, Said
from tests.helpers.sound_models import SOUND, Bag

CAUSES = ("padding", "max-pooling", "packed", "batch norm", "negatives", "class weights", "tokens", "mixup", "state")


def make(kind, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return kind()


def refusal(losses, examples, **settings) -> str:
    with pytest.raises(ValueError, match="loss") as caught:
        edpsgd.check_losses(losses, examples, **settings)
    return str(caught.value)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused(name, seed) -> None:
    """Unlike autograd, which finds nothing wrong with it."""
    model, examples = make(MIXING[name], seed), some_examples(seed=seed)
    if "PooledBatch" not in name:
        assert torch.isfinite(model(examples)).all()
    message = refusal(make(MIXING[name], seed), examples)
    if "failed" not in message:
        assert all(cause in message for cause in CAUSES)
        assert " % " in message
        assert "of example " in message
    if "State" in name or "Queue" in name:
        assert "from step to step" in message


@pytest.mark.parametrize("name", SOUND)
def test_sound_losses_pass(name) -> None:
    assert len(SOUND) >= 20
    edpsgd.check_losses(make(SOUND[name]), some_examples())


@pytest.mark.parametrize("name", ["Bag", "TransformerEncoder", "Convolution", "RelativePositions", "GroupNorms"])
def test_sound_losses_pass_in_half_precision(name) -> None:
    model = make(SOUND[name])

    def losses(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    edpsgd.check_losses(losses, some_examples(), model=model)


def test_mixing_is_refused_in_half_precision() -> None:
    model = make(MIXING["ClassWeights"])

    def losses(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    assert "rounding explains 2 %" in refusal(losses, some_examples(), model=model)


def some_utterances() -> list[Said]:
    draw, sizes = np.random.default_rng(0), (1, 2, 3, 5, 5, 8, 11)
    return [Said(draw.integers(0, 9, n).tolist(), draw.integers(0, TAGS, n).tolist(), n % INTENTS) for n in sizes]


@pytest.mark.parametrize("keeps_apart", [True, False])
def test_clc_passes(keeps_apart) -> None:
    model = small_models.tiny("clc")
    model.keeps_apart = keeps_apart
    edpsgd.check_losses(lambda said: model(small_models.batch("clc", said)), some_utterances(), model=model)


def test_bert_passes() -> None:
    """A pretrained encoder, with low-rank adapters that begin at zero, and all of it trained; in two layers."""
    inputs = BertInputs.pretrained(str(small_models.ENCODER))
    table = inputs.table(small_models.WORDS)
    model = BERT.pretrained(str(small_models.ENCODER), INTENTS, TAGS)
    model.encoder.encoder.layer = model.encoder.encoder.layer[:2]

    def losses(said):
        lengths = np.array([len(one.words) for one in said])
        words = np.array([word for one in said for word in one.words])
        return model({**small_models.batch("bert", said), **table.batch(words, lengths)})

    edpsgd.check_losses(losses, some_utterances()[1:6], model=model)
    model.freeze("adapters:2")
    edpsgd.check_losses(losses, some_utterances()[1:6], model=model)


def test_the_language_model_passes() -> None:
    torch.manual_seed(0)
    model = LanguageModel(20, 6, 8)

    def losses(texts):
        longest = max(len(text) for text in texts)
        rows = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        is_real = torch.arange(longest)[1:] < torch.tensor([[len(text)] for text in texts])
        return model.losses(rows[:, :-1], rows[:, 1:].masked_fill(~is_real, NO_TARGET))

    draw = random.Random(0)
    edpsgd.check_losses(losses, [draw.choices(range(20), k=2 + size) for size in range(7)], model=model)


class ZeroGates(Model):
    """The part that mixes is multiplied by zero before training, and so are its gradients."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2))

    def encode(self, tokens, mask, lengths):
        return self.words(tokens)[:, 0] + self.gates[0] * self.gates[1] * self.words(tokens).mean(1)


def test_weights_that_hide_it_are_moved() -> None:
    model = make(ZeroGates)
    assert "weights moved at random" in refusal(model, some_examples())
    assert model.gates.tolist() == [0, 0]


class Everything(Model):
    """Moves whatever can be moved, and draws from all generators, but its loss is its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.tensor, self.seen, self.number = torch.zeros(2), [], 0
        self.frozen = nn.Dropout(0.5).eval()

    def encode(self, tokens, mask, lengths):
        self.calls += 1
        self.tensor = self.tensor + 1
        self.seen.append(tokens)
        self.number += 1
        self.new = tokens
        torch.rand(3), np.random.rand(3), random.random()
        return super().encode(tokens, mask, lengths)


def test_everything_is_left_as_it_was() -> None:
    model = make(Everything)
    model.words.eval()
    model(some_examples()).sum().backward()
    model.seen.clear()
    del model.new
    before = copy.deepcopy({name: value for name, value in vars(model).items() if not name.startswith("_")})
    state = copy.deepcopy(model.state_dict())
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    edpsgd.check_losses(model, some_examples())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (np.random.get_state()[1] == generators[1]).all()
    assert random.getstate() == generators[2]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert (model.seen, model.number, model.tensor.tolist()) == ([], before["number"], before["tensor"].tolist())
    assert not hasattr(model, "new")
    assert [module.training for module in model.modules()] == modes
    for parameter, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, values)


def test_a_refusal_leaves_everything_as_it_was_too() -> None:
    model = make(MIXING["QueueOfKeys"]).eval()
    state = copy.deepcopy(model.state_dict())
    refusal(model, some_examples())
    assert len(model.memory["keys"]) == 0
    assert not model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_change_of_parameters_is_refused() -> None:
    model = make(Bag)

    def losses(batch):
        model.out.weight.data[0, 0] += 1e-6
        return model(batch)

    with pytest.raises(ValueError, match=r"parameters change in forward .* out\.weight"):
        edpsgd.check_losses(losses, some_examples(), model=model)


def test_without_a_model() -> None:
    """Dropout is off in functions of torch all the same, and gradients are found by their graph."""
    weight = torch.randn(4, requires_grad=True)
    examples = list(torch.randn(8, 4))
    edpsgd.check_losses(lambda batch: nn.functional.dropout(torch.stack(batch)) @ weight, examples)
    mixed = make(MIXING["GradientsMixed"])
    assert "gradient" in refusal(lambda batch: mixed(batch), some_examples())


def test_own_random_numbers_are_named() -> None:
    model = make(Bag)
    noisy = refusal(lambda batch: model(batch) + torch.randn(len(batch)), some_examples(), model=model)
    assert "random numbers" in noisy


def test_losses_that_are_not_finite() -> None:
    model = make(Bag)

    def losses(batch):
        return torch.where(torch.tensor([len(tokens) == 5 for tokens, _ in batch]), torch.nan, model(batch))

    assert "example 2 is not finite" in refusal(losses, some_examples(), model=model)


def test_losses_that_are_not_finite_in_company() -> None:
    model = make(Bag)
    message = refusal(
        lambda batch: model(batch) * (1.0 if len(batch) == 1 else torch.inf), some_examples(), model=model
    )
    assert "changes by inf %" in message


def test_texts_are_not_told() -> None:
    examples = ["call anna at 123456789", "hello", "yes please do"]

    def losses(batch):
        return torch.tensor([float(len(text)) for text in batch]) / len(batch)

    assert "anna" not in refusal(losses, examples)


def test_bad_arguments() -> None:
    model, examples = make(Bag), some_examples()
    with pytest.raises(ValueError, match="at least two"):
        edpsgd.check_losses(model, examples[:1])
    with pytest.raises(ValueError, match="tolerance must be"):
        edpsgd.check_losses(model, examples, tolerance=0.0)
    with pytest.raises(ValueError, match="function or module"):
        edpsgd.check_losses(3, examples)
    with pytest.raises(ValueError, match=r"of shape \(1,\), got \(\)"):
        edpsgd.check_losses(lambda batch: model(batch).squeeze(), examples, model=model)
    with pytest.raises(ValueError, match="one loss for each example"):
        edpsgd.check_losses(lambda batch: model(batch).repeat(2), examples, model=model)
    with pytest.raises(ValueError, match="too small"):
        edpsgd.check_losses(lambda batch: model(batch) * 1e-9, examples, model=model)


def test_a_given_tolerance() -> None:
    model = make(Bag)

    def losses(batch):
        return model(batch) * (1 + 1e-3 * len(batch))

    assert "changes by" in refusal(losses, some_examples(), model=model)
    edpsgd.check_losses(losses, some_examples(), model=model, tolerance=0.1)


def test_the_optimizer_is_told() -> None:
    model = make(Bag)
    optimizer = private(model, unit="example", divisor=8)
    assert not optimizer._are_losses_checked
    refusal(lambda batch: model(batch) / len(batch), some_examples(), model=model, optimizer=optimizer)
    assert not optimizer._are_losses_checked
    edpsgd.check_losses(model, some_examples(), optimizer=optimizer)
    assert optimizer._are_losses_checked


# ---------------------------------------------------------------- gradients that do not add up, and rounding that grows


class Clamped(torch.autograd.Function):
    """The identity, with a gradient that is bounded on its way back."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-2, 1e-2)


def test_gradients_that_do_not_add_up_are_refused() -> None:
    """Each one alone is right, and together they are not the sum."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)

    def losses(batch):
        return last(Clamped.apply(first(torch.stack(batch)).tanh())).squeeze(1).square()

    with pytest.raises(ValueError, match="not the sum of the single ones"):
        edpsgd.check_losses(losses, list(torch.randn(8, 4)), model=nn.ModuleList([first, last]))


def test_a_long_recurrence_in_which_rounding_grows_is_not_refused() -> None:
    torch.manual_seed(0)
    rnn, head = nn.RNN(8, 64, batch_first=True), nn.Linear(64, 1)
    nn.init.orthogonal_(rnn.weight_hh_l0)

    def losses(batch):
        return head(rnn(torch.stack(batch))[0][:, -1]).squeeze(1).square()

    edpsgd.check_losses(losses, list(torch.randn(6, 150, 8)), model=nn.ModuleList([rnn, head]))


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(1)), random.random])
def test_mixing_that_is_drawn_at_random_is_found_more_often_than_not(draw) -> None:
    """With other draws each time, so that trying again helps."""
    layer, refused = nn.Linear(4, 1), 0

    def losses(batch):
        inputs = torch.stack(batch)
        inputs = 0.7 * inputs + 0.3 * inputs.flip(0) if draw() < 0.2 else inputs
        return layer(inputs).squeeze(1).square()

    for _ in range(10):
        try:
            edpsgd.check_losses(losses, list(torch.randn(6, 4)), model=layer)
        except ValueError:
            refused += 1
    assert refused >= 5  # each time with a probability of 1 - 0.8^12 = 0.93
