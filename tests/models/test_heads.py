"""Both models against sums over all sequences of tags; one utterance says nothing about another."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import edpsgd
from models.bert import paper_configuration
from models.bio_chain import FORBIDDEN, fix_transitions
from models.heads import HeadSettings, IntentSlotModel, length_mask, pad
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


# ---------------------------------------------------------------- fixed transitions, schemas, weights


class Given(IntentSlotModel):
    """The features are in the batch."""

    def __init__(self, tags: int = 5, intents: int = 3, **heads) -> None:
        torch.manual_seed(0)
        super().__init__(6, intents, tags, 0.0, HeadSettings(**heads))

    def features(self, batch):
        return batch["words"], batch["words"].mean(1)


def given(lengths: list[int], tags: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.from_numpy(length_mask(np.array(lengths)))
    return {
        "words": 3 * torch.randn(*mask.shape, 6),
        "mask": mask,
        "tags": torch.zeros(mask.shape, dtype=torch.long),
        "intents": torch.arange(len(lengths)) % 3,
    }


def is_bio(tags: tuple[int, ...]) -> bool:
    """O is 0, B and I of slot s are 2s - 1 and 2s: I follows B or I of its slot."""
    for before, tag in zip((0, *tags), tags, strict=False):
        if tag > 0 and tag % 2 == 0 and before not in (tag - 1, tag):
            return False
    return True


def test_fixed_transitions_leave_bio_sequences_and_their_scores_alone() -> None:
    """The loss against a sum over the sequences that BIO allows, and the best of these by trial."""
    model = Given(transitions="bio").eval()
    for length in (1, 2, 4):
        batch = given([length])
        emissions = model.scores(batch)[1][0].tolist()
        weights = {}
        for tags in itertools.product(range(5), repeat=length):
            if is_bio(tags):
                weights[tags] = sum(row[tag] for row, tag in zip(emissions, tags, strict=True))
        total = math.log(sum(math.exp(weight) for weight in weights.values()))
        for tags, weight in weights.items():
            batch["tags"] = torch.tensor([tags])
            intent = torch.nn.functional.cross_entropy(model.scores(batch)[0], batch["intents"])
            assert model(batch).item() == pytest.approx(total - weight + intent.item(), abs=1e-4)
        assert tuple(model.predict(batch)[0].tags) == max(weights, key=weights.__getitem__)
        marginals = model.outputs(batch).tags[0]
        first = sum(math.exp(weight - total) for tags, weight in weights.items() if tags[0] == 1)
        assert marginals[0, 1].item() == pytest.approx(first, abs=1e-6)
        assert marginals[0, [2, 4]].abs().max() < 1e-12


def test_fixed_transitions_are_not_trained_and_survive_saving() -> None:
    model = Given(transitions="bio")
    assert not any(p.requires_grad for p in model.crf.parameters())
    assert all(p.requires_grad for part in (model.intent, model.slots) for p in part.parameters())
    again = Given(**model.head_settings())
    assert all(torch.equal(a, b) for a, b in zip(model.crf.parameters(), again.crf.parameters(), strict=True))


def test_a_schema_limits_loss_and_answers() -> None:
    """As if the tags that do not go with the intent were not there."""
    allowed = [[0, 1, 2], [0, 3, 4], [0]]
    model = Given(transitions="bio", allowed=allowed).eval()
    free = Given(transitions="bio").eval()
    batch = given([3, 4, 2, 1, 4])
    intents, emissions = free.scores(batch)
    expected = []
    for row, intent in enumerate(batch["intents"].tolist()):
        own = torch.tensor(allowed[intent])
        small = Given(tags=len(own), transitions="bio")
        fix_transitions(small.crf)
        one = emissions[row : row + 1][:, :, own], batch["tags"][row : row + 1], batch["mask"][row : row + 1]
        likelihood = small.crf(one[0], one[1], mask=one[2])
        expected.append(torch.nn.functional.cross_entropy(intents[row], batch["intents"][row]) - likelihood)
    torch.testing.assert_close(model(batch), torch.stack(expected), rtol=0, atol=1e-4)
    torch.testing.assert_close(model.outputs(batch).losses.float(), torch.stack(expected), rtol=0, atol=1e-4)
    said = model.outputs(batch)
    for row, answer in enumerate(model.predict(batch, with_scores=True)):
        assert set(answer.tags) <= set(allowed[answer.intent])
        others = [tag for tag in range(5) if tag not in allowed[answer.intent]]
        assert said.tags[row, : len(answer.tags), others].abs().max() < 1e-12
        assert all(0 < score <= 1 for score in answer.tag_scores)


def test_heads_of_zeros_and_the_weight_of_intents() -> None:
    batch = given([3, 2])
    zero = Given(zero_start=True, transitions="bio")
    sequences_of = [sum(is_bio(tags) for tags in itertools.product(range(5), repeat=length)) for length in (3, 2)]
    expected = torch.tensor([math.log(3) + math.log(number) for number in sequences_of])
    torch.testing.assert_close(zero(batch), expected)
    heavy = Given(zero_start=True, transitions="bio", intent_weight=6.0)
    torch.testing.assert_close(heavy(batch) - zero(batch), torch.full((2,), 5 * math.log(3)))
    torch.testing.assert_close(heavy.outputs(batch).losses.float(), heavy(batch))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"transitions": "free"}, "transitions must be one of trained, bio, got 'free'"),
        ({"intent_weight": 0.0}, "intent_weight must be above 0"),
        ({"intent_weight": math.nan}, "intent_weight must be above 0"),
        ({"allowed": [[0]]}, "a list of tags from 0 to 4 for each of 3 intents"),
        ({"allowed": [[0], [5], [0]]}, "a list of tags from 0 to 4 for each of 3 intents"),
    ],
)
def test_settings_of_heads_that_are_refused(settings, wanted) -> None:
    with pytest.raises(ValueError, match=wanted):
        Given(**settings)


def test_no_likelihood_is_lost_in_forbidden_scores() -> None:
    """Sums of allowed scores stay exact beside them, also in long utterances."""
    model = Given(transitions="bio")
    batch = given([200])
    exact = Given(transitions="bio").double()
    batch64 = {**batch, "words": batch["words"].double()}
    assert model(batch).item() == pytest.approx(exact(batch64).item(), rel=1e-5)
    assert FORBIDDEN < -1e3
