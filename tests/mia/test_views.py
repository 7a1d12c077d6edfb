"""What an attacker sees: probabilities against enumeration, features of a fixed size, and files of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torchcrf import CRF

from mia.views import TOP, VERSION, View, features, view
from models.heads import Outputs
from models.marginals import likelihood_and_marginals
from tasks.nlu import generator
from tasks.nlu.corpus import Corpus
from tasks.nlu.new_model import build
from tests.helpers.jobs import tiny as tiny_config
from tests.helpers.small_models import TAGS, Said, batch, tiny

SAID = [Said([0, 1, 2, 5], [0, 2, 1, 0], 3), Said([4, 8], [1, 2], 0), Said([3], [2], 1)]


def enumerated(model, emissions: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of tags of one utterance, by hand."""
    crf, scores = model.crf.requires_grad_(False), {}
    for tags in itertools.product(range(TAGS), repeat=len(emissions)):
        score = float(crf.start_transitions[tags[0]] + crf.end_transitions[tags[-1]])
        score += sum(float(emissions[place, tag]) for place, tag in enumerate(tags))
        scores[tags] = score + sum(float(crf.transitions[a, b]) for a, b in itertools.pairwise(tags))
    total = np.logaddexp.reduce(list(scores.values()))
    return {tags: float(np.exp(score - total)) for tags, score in scores.items()}


@pytest.mark.parametrize("kind", ["clc", "bert"])
def test_marginals_and_losses_are_those_of_enumeration(kind) -> None:
    model, given = tiny(kind), batch(kind, SAID)
    found = model.outputs(given)
    with torch.no_grad():
        intents, emissions = model.scores(given)
    for row, one in enumerate(SAID):
        likely = enumerated(model, emissions[row, : len(one.words)])
        marginals = np.zeros((len(one.words), TAGS))
        for tags, probability in likely.items():
            marginals[np.arange(len(tags)), tags] += probability
        np.testing.assert_allclose(found.tags[row, : len(one.words)], marginals, atol=1e-6)
        intent = torch.softmax(intents[row], 0)[one.intent]
        assert float(found.losses[row]) == pytest.approx(-np.log(likely[tuple(one.tags)] * float(intent)), rel=1e-5)


@pytest.mark.parametrize("kind", ["clc", "bert"])
def test_losses_are_those_of_training(kind) -> None:
    model, given = tiny(kind), batch(kind, SAID)
    torch.testing.assert_close(model.outputs(given).losses.float(), model(given).detach(), rtol=1e-5, atol=1e-5)


def test_a_loss_near_zero_is_exact() -> None:
    """In single precision nothing would be left of it: the scores are of the size of a million."""
    model = tiny("clc")
    with torch.no_grad():
        model.slots.weight.zero_()
        model.slots.bias.copy_(torch.tensor([1e6, 1e6 - 14.0, 0.0]))
        model.intent.weight.zero_()
        model.intent.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 1e6]))
        for p in model.crf.parameters():
            p.zero_()
    [loss] = model.outputs(batch("clc", [Said([0, 1], [0, 0], 3)])).losses.tolist()
    assert loss == pytest.approx(2 * np.log1p(np.exp(-14.0)), rel=1e-3)


def test_marginals_of_many_tags_are_the_gradient_of_the_partition() -> None:
    """By the CRF itself, in double precision; transitions of very different size."""
    torch.manual_seed(0)
    crf = CRF(60, batch_first=True).double()
    for p in crf.parameters():
        torch.nn.init.normal_(p, std=30.0)
    emissions = (20.0 * torch.randn(5, 7, 60, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(7) < torch.tensor([7, 1, 3, 2, 5])[:, None]
    tags = torch.randint(60, (5, 7))
    expected = crf(emissions, tags, mask=mask, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), emissions)
    likelihood, marginals = likelihood_and_marginals(crf, emissions, tags, mask)
    torch.testing.assert_close(likelihood, expected.detach())
    chosen = torch.nn.functional.one_hot(tags, 60) - gradient
    torch.testing.assert_close(marginals[mask], chosen[mask])


def test_features_are_sorted_and_say_nothing_of_padding() -> None:
    tags = torch.tensor([[[0.2, 0.5, 0.3], [0.9, 0.1, 0.0], [7.0, 8.0, 9.0]]])
    found = features(Outputs(torch.zeros(1), torch.tensor([[0.4, 0.6]]), tags), torch.tensor([[True, True, False]]))[0]
    expected = [[0.6, 0.4, 0, 0, 0], [0.7, 0.2, 0.1, 0, 0], [0.5, 0.1, 0, 0, 0], [0.9, 0.3, 0.2, 0, 0]]
    np.testing.assert_allclose(found.numpy(), np.ravel(expected), atol=1e-6)


@pytest.mark.parametrize("kind", ["clc", "bert"])
def test_every_utterance_gets_its_own_answer(kind, tmp_path) -> None:
    """Whatever the order of lengths, and for models with other labels the same number of features."""
    corpus = Corpus(generator.utterances(150))
    parts = build(tiny_config(tmp_path, model=kind), corpus, np.arange(150))
    rows = np.array([149, 3, 80, 3, 7])
    shown = []
    found = view(parts, corpus, rows, shown=shown.append)
    assert found.features.shape == (5, 4 * TOP)
    assert sum(shown) == 5
    for number, row in enumerate(rows):
        alone = view(parts, corpus, np.array([row]))
        np.testing.assert_allclose(found.features[number], alone.features[0], atol=1e-5)
        assert found.log_probabilities[number] == pytest.approx(alone.log_probabilities[0], rel=1e-4)


def test_a_feature_file_is_read_as_it_was_written(tmp_path) -> None:
    kept = View(np.ones((2, 4 * TOP), np.float32), np.array([-0.5, -1e-9]))
    kept.save(tmp_path / "view.npz")
    found = View.load(tmp_path / "view.npz")
    assert (found.features == kept.features).all()
    assert (found.log_probabilities == kept.log_probabilities).all()


def test_a_feature_file_of_another_version(tmp_path) -> None:
    np.savez(tmp_path / "old.npz", version=VERSION + 1, features=np.ones((2, 3)), log_probabilities=np.ones(2))
    with pytest.raises(ValueError, match=f"old.npz holds features of version {VERSION + 1}"):
        View.load(tmp_path / "old.npz")


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 cut off"])
def test_a_damaged_feature_file(tmp_path, content) -> None:
    (tmp_path / "view.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"view\.npz is no feature file, or damaged \(\w+\): delete it"):
        View.load(tmp_path / "view.npz")
