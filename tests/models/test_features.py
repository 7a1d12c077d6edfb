"""What heads read of hidden layers: against the encoder's own answers, utterance by utterance."""

from __future__ import annotations

import pytest
import torch

from models.bert import BERT
from models.features import of_utterances, of_words, parse_layers, word_width
from tests.helpers.small_models import INTENTS, TAGS, WORDS, Said, batch, inputs, tiny_configuration

THREE = [Said([0, 1, 2, 8], [0, 1, 2, 0], 3), Said([1, 7], [2, 2], 0), Said([4], [1], 1)]


def frozen(layers: list[int], window: int) -> BERT:
    torch.manual_seed(1)
    pieces = len(inputs("bert").tokenizer)
    model = BERT(tiny_configuration(pieces, layers=3), INTENTS, TAGS, 0.0, layers=layers, window=window)
    model.freeze("encoder")
    return model


@pytest.mark.parametrize(
    ("text", "layers"), [("last", []), ("auto", [0, 3, 6]), ("layers:6", [6]), ("layers:4,0", [0, 4])]
)
def test_layers_of_a_text(text, layers) -> None:
    assert parse_layers(text, 6) == layers


@pytest.mark.parametrize(
    "text", ["", "first", "layers:", "layers:0", "layers:7", "layers:1,,2", "layers:a", "layers:-1"]
)
def test_layers_that_there_are_not(text) -> None:
    with pytest.raises(ValueError, match="numbers up to 6, one of them 1 or more"):
        parse_layers(text, 6)


def test_auto_of_the_shallowest_encoder() -> None:
    assert parse_layers("auto", 1) == [0, 1]


@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize("own", [[], [0]], ids=["", "own pieces"])
def test_features_are_those_of_the_encoder_word_by_word(window, own) -> None:
    model = frozen([*own, 1, 3], window)
    words, utterances = model.features(batch("bert", THREE))
    assert words.shape[2] == word_width(2 + len(own), 16, window) == model.slots.in_features
    cut = {word: len(inputs("bert").tokenizer.tokenize(word)) for word in WORDS}
    for row, said in enumerate(THREE):
        alone = batch("bert", [said])
        states = model.encoder(alone["pieces"], alone["read"], output_hidden_states=True).hidden_states
        table = model.encoder.get_input_embeddings()(alone["pieces"])[0]
        firsts = [1 + sum(cut[WORDS[word]] for word in said.words[:number]) for number in range(len(said.words))]
        nothing = torch.zeros(16)
        squares = []
        for number, first in enumerate(firsts):
            low = states[1][0, first]
            pieces = table[first : first + cut[WORDS[said.words[number]]]].mean(0)
            expected = [pieces / pieces.norm() * low.norm()] if own else []
            expected += [low, states[3][0, first]]
            for distance in range(1, window + 1):
                for beside in (number - distance, number + distance):
                    is_there = 0 <= beside < len(firsts)
                    expected.append(states[1][0, firsts[beside]] if is_there else nothing)
            joined = torch.cat(expected)
            squares.append(joined.square().sum())
            torch.testing.assert_close(words[row, number], joined, rtol=0, atol=1e-5)
        mean = (states[1][0].mean(0) + states[3][0].mean(0)) / 2
        length = torch.stack(squares).mean().sqrt()
        torch.testing.assert_close(utterances[row], mean / mean.norm() * length, rtol=0, atol=1e-4)


def test_padding_is_no_neighbour() -> None:
    """Whatever stands at places that the mask leaves out."""
    states = torch.randn(1, 3, 1, 4)
    mask = torch.tensor([[True, True, False]])
    found = of_words(states, mask, [1], 1)
    states[0, 2] = 1e6
    assert torch.equal(of_words(states, mask, [1], 1), found)
    assert not found[0, 2].any()


def test_an_utterance_of_zeros_has_no_direction_and_no_nan() -> None:
    words, mask = torch.ones(2, 4, 5), torch.ones(2, 4, dtype=torch.bool)
    assert torch.equal(of_utterances(torch.zeros(2, 3), words, mask), torch.zeros(2, 3))
    assert torch.equal(of_utterances(torch.ones(2, 3), torch.zeros(2, 4, 5), mask), torch.zeros(2, 3))


def test_an_encoder_that_is_frozen_has_no_dropout_and_no_gradient() -> None:
    model = frozen([2], 1).train()
    assert model.training
    assert not model.encoder.training
    given = batch("bert", THREE)
    assert torch.equal(model(given), model(given))
    model(given).sum().backward()
    assert all(p.grad is None for p in model.encoder.parameters())
    assert model.slots.weight.grad is not None
    model.freeze("none")
    assert model.encoder.training


def test_a_window_needs_layers() -> None:
    with pytest.raises(ValueError, match="window is for chosen layers"):
        BERT(tiny_configuration(50), INTENTS, TAGS, window=1)
