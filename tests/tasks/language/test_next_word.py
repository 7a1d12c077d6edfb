"""Accuracy, perplexity and head words: by a loop over sentences, and by hand for a model that always says the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from models.language_model import LanguageModel
from tasks.language.next_word import evaluate
from tasks.language.user_texts import UserData

BOS, EOS = 1, 2


def one_minded(scores: dict[int, float], words: int) -> LanguageModel:
    """Gives each word the same logit everywhere."""
    model = LanguageModel(words, dimension=words, hidden=2)
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(words))
        model.output.weight.zero_()
        model.output.bias.zero_()
        for word, score in scores.items():
            model.output.bias[word] = score
    return model


def by_hand(model: LanguageModel, data: UserData) -> dict[str, float]:
    """Sentence by sentence, with softmax and sorted()."""
    hits, loss, words = {1: 0, 3: 0, 5: 0}, 0.0, 0
    for user in range(len(data)):
        for sentence in data.of_user(user):
            said = sentence.tolist()
            if not said:
                continue
            chances = model(torch.tensor([[BOS, *said]]))[0][0].double().softmax(dim=1).tolist()
            for row, target in zip(chances, [*said, EOS], strict=True):
                order = sorted(range(len(row)), key=lambda word, row=row: -row[word])
                for size in hits:
                    hits[size] += target in order[:size] and target != 0
                loss -= math.log(row[target])
                words += 1
    shares = {size: count / words for size, count in hits.items()}
    return {"accuracy": shares[1], "top3": shares[3], "top5": shares[5], "perplexity": math.exp(loss / words)}


def random_users(longest: int) -> UserData:
    """Five words, UNK among them; users without sentences and a sentence without words too."""
    rng = np.random.default_rng(0)
    said = [rng.choice([0, 3, 4, 5, 6, 7], size).tolist() for size in (3, 1, 0, 12, 7, longest)]
    return UserData.from_lists([said[:3], [], said[3:], []])


def lively() -> LanguageModel:
    """Predictions that depend on all words before."""
    torch.manual_seed(0)
    model = LanguageModel(8, dimension=6, hidden=5)
    with torch.no_grad():
        for parameter in model.lstm.parameters():
            parameter.mul_(40)
        model.output.weight.mul_(3)
    return model


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_five_words_by_a_loop(batch) -> None:
    model, data = lively(), random_users(20)
    result, expected = evaluate(model, data, batch=batch), by_hand(model, data)
    assert {name: getattr(result, name) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert 0 < result.accuracy < result.top3 < result.top5 < 1
    assert result.words == 43 + 5
    assert result.head[10] == [0, 0, 0, 0, 0, 48, 0, 0, 0, 0, 0]  # all eight are predicted, and three are no words


def test_the_state_is_carried_through_a_long_sentence() -> None:
    """Longer than what is computed at a time, in steps and in rows of logits."""
    model, data = lively(), random_users(700)
    assert evaluate(model, data).perplexity == pytest.approx(by_hand(model, data)["perplexity"], rel=1e-5)


def test_unknown_words_are_wrong_even_if_predicted() -> None:
    """UNK first, then word 3: of UNK, 3, 4, 3, EOS none is right at once, and the two 3 are among three."""
    result = evaluate(one_minded({0: 3.0, 3: 2.0, 4: -1.0, 2: -2.0}, 8), UserData.from_lists([[[0, 3, 4, 3]]]))
    assert (result.accuracy, result.top3, result.top5) == (0, 2 / 5, 2 / 5)
    total = math.exp(3) + math.exp(2) + math.exp(-1) + math.exp(-2) + 4
    logits = 3 + 2 - 1 + 2 - 2
    assert result.perplexity == pytest.approx(math.exp(math.log(total) - logits / 5))


def test_head_words() -> None:
    """Row 3 is the most frequent word, row 12 the tenth, 52 the fiftieth, 102 the hundredth."""
    best = [0, 3, 4, 12, 13, 52, 53, 102, 103, 150]
    model = one_minded({word: 5.0 + number for number, word in enumerate(best)}, 203)
    result = evaluate(model, UserData.from_lists([[[3, 9], [150]]]))
    assert result.head == {
        size: [5 if n == found else 0 for n in range(11)] for size, found in ((10, 3), (50, 5), (100, 7))
    }
    assert result.accuracy == 1 / 5


def test_hopeless_models_have_a_perplexity_too() -> None:
    assert evaluate(one_minded({3: 5000.0}, 6), UserData.from_lists([[[4]]])).perplexity == math.inf
    assert math.isnan(evaluate(one_minded({3: math.nan}, 6), UserData.from_lists([[[4]]])).perplexity)


def test_nothing_is_trained_or_kept() -> None:
    model = LanguageModel(8, 4, 4)
    evaluate(model, random_users(5))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("users", "batch", "message"),
    [
        ([[[3]]], 0, "batch must be an int >= 1"),
        ([[], [[]]], 64, "data must hold at least one word"),
        ([[[8]]], 64, "from 0 to 7, got 8 to 8"),
        ([[[-1, 5]]], 64, "from 0 to 7, got -1 to 5"),
    ],
)
def test_what_cannot_be_evaluated(users, batch, message) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(LanguageModel(8, 4, 4), UserData.from_lists(users), batch=batch)
