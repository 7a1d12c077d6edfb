"""Both models against sums over all sequences of tags; one utterance says nothing about another."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import edpsgd
from models.bert import paper_configuration
from models.heads import IntentSlotModel, length_mask, pad
from tests.helpers.common import layers_of, private, quiet
from tests.helpers.small_models import INTENTS, TAGS, Said, batch, tiny

KINDS = ["clc", "bert"]
THREE = [Said([0, 1, 2], [0, 1, 2], 3), Said([1, 7], [2, 2], 0), Said([4], [1], 1), Said([3, 3, 8], [0, 0, 1], 2)]
LONG = [Said([5, 5, 5, 0, 1, 2, 3, 4, 6, 7], [0, 1, 2] * 3 + [1], 1), Said([5], [0], 0)]


def sequences(model: IntentSlotModel, emissions: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of tags, from its definition: a softmax over sums of scores."""
    start, end = model.crf.start_transitions.tolist(), model.crf.end_transitions.tolist()
    moves, rows = model.crf.transitions.tolist(), emissions.tolist()
    scores = {}
    for tags in itertools.product(range(TAGS), repeat=len(rows)):
        score = start[tags[0]] + end[tags[-1]] + sum(row[tag] for row, tag in zip(rows, tags, strict=True))
        scores[tags] = score + sum(moves[a][b] for a, b in itertools.pairwise(tags))
    total = sum(math.exp(score) for score in scores.values())
    return {tags: math.exp(score) / total for tags, score in scores.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_that_of_intent_and_tags(kind) -> None:
    model = tiny(kind)
    for said in THREE:
        alone = batch(kind, [said])
        intents, emissions = (scores.detach() for scores in model.scores(alone))
        intent = math.exp(intents[0, said.intent]) / sum(math.exp(score) for score in intents[0])
        tags = sequences(model, emissions[0])[tuple(said.tags)]
        assert model(alone).item() == pytest.approx(-math.log(intent) - math.log(tags), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_depends_on_no_other_utterance(kind) -> None:
    """Longer utterances and longer words beside it, before it or after it, change nothing."""
    model = tiny(kind)
    alone = torch.cat([model(batch(kind, [said])) for said in THREE])
    assert alone.shape == (4,)
    assert len({round(loss, 3) for loss in alone.tolist()}) == 4
    for order in itertools.permutations(range(4)):
        found = model(batch(kind, [THREE[i] for i in order]))
        torch.testing.assert_close(found, alone[list(order)], rtol=0, atol=1e-5)
    torch.testing.assert_close(model(batch(kind, THREE + LONG))[:4], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(batch(kind, LONG + THREE))[2:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_mean_of_those_of_the_utterances(kind) -> None:
    """Each counts alike, whatever its length; so a micro-batch can be cut into buckets."""
    model = tiny(kind).double()
    said = THREE + LONG
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in said:
        gradients = torch.autograd.grad(model(batch(kind, [one])).sum(), [*model.parameters()], materialize_grads=True)
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient / len(said)
    model(batch(kind, said)).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_prediction_is_the_likeliest_of_all(kind, seed) -> None:
    model = tiny(kind, seed)
    with torch.no_grad():
        intents, emissions = model.scores(batch(kind, THREE))
    found = model.predict(batch(kind, THREE), with_scores=True)
    for row, (answer, said) in enumerate(zip(found, THREE, strict=True)):
        exponentials = [math.exp(score) for score in intents[row]]
        assert answer.intent == int(np.argmax(exponentials))
        assert answer.intent_score == pytest.approx(max(exponentials) / sum(exponentials), abs=1e-5)
        likely = sequences(model, emissions[row, : len(said.words)])
        assert tuple(answer.tags) == max(likely, key=likely.__getitem__)
        marginals = [
            sum(p for tags, p in likely.items() if tags[place] == tag) for place, tag in enumerate(answer.tags)
        ]
        assert answer.tag_scores == pytest.approx(marginals, abs=1e-5)
    without = model.predict(batch(kind, THREE))
    assert [answer._replace(tag_scores=[]) for answer in found] == without


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_depends_on_no_other_utterance(kind) -> None:
    model = tiny(kind)
    together = model.predict(batch(kind, LONG + THREE), with_scores=True)
    for said, found in zip(LONG + THREE, together, strict=True):
        [alone] = model.predict(batch(kind, [said]), with_scores=True)
        assert (found.intent, found.tags) == (alone.intent, alone.tags)
        assert found.intent_score == pytest.approx(alone.intent_score, abs=1e-5)
        assert found.tag_scores == pytest.approx(alone.tag_scores, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_leaves_no_gradients(kind) -> None:
    model = tiny(kind)
    model.predict(batch(kind, THREE), with_scores=True)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_private_training(kind) -> None:
    """The model is accepted as it is, a step moves every parameter that is trained, and no other."""
    model = tiny(kind, train_words=False).train()
    edpsgd.check_model(model, lambda: model(batch(kind, THREE)))
    if kind == "bert":
        model.freeze("embeddings")
    before = layers_of(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with quiet():
        optimizer = private(model, torch.optim.AdamW(model.parameters(), lr=0.01), noise_multiplier=0.5)
        for step in range(2):
            optimizer.zero_grad()
            for micro_batch in (THREE, LONG):
                model(batch(kind, micro_batch)).mean().backward()
                if micro_batch is THREE:
                    optimizer.accumulate()
            optimizer.step()
            assert optimizer.ledger.events[0].steps == step + 1
    after = layers_of(model)
    assert {name for name in after if not torch.equal(after[name], before[name])} == trained
    assert 0 < len(trained) < len(before)
    assert all(torch.isfinite(p).all() for p in after.values())
    assert all(
        len(answer.tags) == len(said.words)
        for answer, said in zip(model.eval().predict(batch(kind, LONG), with_scores=True), LONG, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_what_no_encoder_has(kind) -> None:
    model = tiny(kind)
    heads = {id(p) for p in model.head_parameters()}
    names = {name.split(".")[0] for name, p in model.named_parameters() if id(p) in heads}
    assert names == {"intent", "slots", "crf"}
    sizes = [tuple(p.shape) for p in model.head_parameters()]
    assert (INTENTS,) in sizes
    assert (TAGS, TAGS) in sizes


def test_configuration_of_the_paper() -> None:
    configuration = paper_configuration(1000)
    assert configuration.num_hidden_layers == 4
    assert configuration.num_attention_heads == 12
    assert configuration.hidden_size == 312
    assert configuration.vocab_size == 1000


def test_padding() -> None:
    lengths = np.array([1, 3, 0, 2])
    assert pad(np.arange(1, 7), lengths, fill=9).tolist() == [[1, 9, 9], [2, 3, 4], [9, 9, 9], [5, 6, 9]]
    assert length_mask(lengths).sum(axis=1).tolist() == [1, 3, 0, 2]
    assert pad(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).shape == (0, 1)
