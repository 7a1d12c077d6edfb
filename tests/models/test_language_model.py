"""The language model against a second one, written with matrix products, and its constraint on the table."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from models.language_model import LanguageModel


def small(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    model = LanguageModel(words=9, dimension=4, hidden=6)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for every gate to matter
            parameter.add_(torch.randn_like(parameter))
    return model


def reference(model: LanguageModel, sentence: list[int]) -> torch.Tensor:
    """The logits after each word of one sentence, from the equations of the LSTM."""
    weights = dict(model.named_parameters())
    rows = weights["embedding.weight"]
    table = rows / rows.square().sum(dim=1, keepdim=True).sqrt()
    h, c, logits = torch.zeros(6), torch.zeros(6), []
    for word in sentence:
        gates = weights["lstm.weight_ih_l0"] @ table[word] + weights["lstm.bias_ih_l0"]
        gates = gates + weights["lstm.weight_hh_l0"] @ h + weights["lstm.bias_hh_l0"]
        i, f, g, o = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        logits.append(table @ (weights["output.weight"] @ h + weights["output.bias"]))
    return torch.stack(logits)


SENTENCES = [[1, 5, 3, 3, 8], [1, 0, 4, 6, 2]]
TARGETS = [[5, 3, 3, 8, 2], [0, 4, -100, -100, -100]]


def test_size_of_the_paper() -> None:
    assert (
        sum(p.numel() for p in LanguageModel(10_003).parameters()) == 10_003 * 96 + 4 * 256 * 354 + 96 * 257 == 1347456
    )


def test_logits_equal_the_equations() -> None:
    model = small()
    logits, _ = model(torch.tensor(SENTENCES))
    torch.testing.assert_close(logits, torch.stack([reference(model, sentence) for sentence in SENTENCES]))


def test_a_sentence_goes_on_from_a_state() -> None:
    model, tokens = small(), torch.tensor(SENTENCES)
    whole, last = model(tokens)
    first, state = model(tokens[:, :2])
    second, state = model.encode(tokens[:, 2:], state)
    torch.testing.assert_close(torch.cat([first, second @ model.table().T], dim=1), whole)
    torch.testing.assert_close(state, last)
    assert last[0].shape == last[1].shape == (1, 2, 6)


def test_losses_and_gradients_equal_the_equations() -> None:
    """The table's gradient is that of its use as input and as output."""
    model, targets = small(), torch.tensor(TARGETS)
    losses = model.losses(torch.tensor(SENTENCES), targets)
    chances = [functional.softmax(reference(model, sentence), dim=1) for sentence in SENTENCES]
    expected = [
        -sum(chances[row][place, word].log() for place, word in enumerate(words) if word >= 0) / count
        for row, (words, count) in enumerate(zip(TARGETS, (5, 2), strict=True))
    ]
    torch.testing.assert_close(losses, torch.stack(expected))
    given = torch.autograd.grad(losses @ torch.tensor([1.0, 3.0]), list(model.parameters()))
    wanted = torch.autograd.grad(expected[0] + 3 * expected[1], list(model.parameters()))
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_rows_without_targets_count_nothing() -> None:
    model = small()
    tokens, targets = torch.tensor([*SENTENCES, [1] * 5]), torch.tensor([*TARGETS, [-100] * 5])
    losses = model.losses(tokens, targets)
    assert losses[2] == 0
    torch.testing.assert_close(losses[:2], model.losses(tokens[:2], targets[:2]))
    losses[2].backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert model.losses(tokens[:0], targets[:0]).shape == (0,)


def test_rows_of_the_table_stay_at_length_one() -> None:
    """Neither longer rows nor a wild step can change it."""
    model, tokens = small(), torch.tensor(SENTENCES)
    before = model(tokens)[0]
    with torch.no_grad():
        model.embedding.weight.mul_(torch.linspace(0.1, 30, 9).unsqueeze(1))
    torch.testing.assert_close(model(tokens)[0], before)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    model.losses(tokens, torch.tensor(TARGETS)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.table().norm(dim=1), torch.ones(9))
    assert not torch.allclose(model(tokens)[0], before)


def test_a_seed_and_the_settings_make_it_again() -> None:
    model, again, other = small(3), small(3), small(4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.lstm.weight_hh_l0, other.lstm.weight_hh_l0)
    rebuilt = LanguageModel(**model.settings())
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(rebuilt(torch.tensor(SENTENCES))[0], model(torch.tensor(SENTENCES))[0])


@pytest.mark.parametrize("wrong", [{"words": 0}, {"dimension": 1.5}, {"hidden": True}])
def test_bad_sizes(wrong) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be an int >= 1"):
        LanguageModel(**{"words": 5, **wrong})


def test_the_mean_loss_counts_every_word_alike() -> None:
    torch.manual_seed(0)
    model, tokens = LanguageModel(20, 4, 8), torch.randint(0, 20, (3, 5))
    targets = torch.tensor([[1, 2, 3, 4, 5], [6, -100, -100, -100, -100], [7, 8, -100, -100, -100]])
    by_hand = (model.losses(tokens, targets) * torch.tensor([5, 1, 2])).sum() / 8
    torch.testing.assert_close(model.mean_loss(tokens, targets), by_hand)
