"""The sentences of a card about sampling, noise, clipping, scales and trust."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

import edpsgd
from edpsgd import card
from tests.helpers.cards import POISSON, SHUFFLED, section, text_of
from tests.helpers.common import Bag, private, set_gradients


@pytest.mark.parametrize(("unit", "meaning"), [("micro_batch", "replaced by any other"), ("example", "is blank in")])
def test_unit_of_privacy_of_shuffled_batches(unit: str, meaning: str) -> None:
    text = section(text_of({"unit": unit}), "Unit of privacy")
    assert text.startswith("One example, in language data one utterance.")
    assert meaning in text


def test_sampling() -> None:
    assert "user's word" in section(text_of({}), "Sampling")
    vouched = section(text_of({"batches": SHUFFLED}, batching="shuffled"), "Sampling")
    assert "the sampler vouches" in vouched
    assert "1000 examples, 16 steps in an epoch, 2 micro-batches per worker in a step, of 8 examples each" in vouched
    single = section(text_of({"batches": {**POISSON, "micro_batches": None}}, batching="poisson"), "Sampling")
    assert "every example a micro-batch of its own" in single


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, "None: all layers alike."),
        ({"a": 0.5, "b": 1.25}, "Given by the user for 2 layers, between 0.5 and 1.25: they must come from public"),
        (repr(edpsgd.FirstStepNorms(2.5)), "Measured privately in the first step, with noise multiplier 2.5;"),
        (repr(edpsgd.FirstStepNorms()), "Raw norms of the first private gradients"),
    ],
)
def test_layer_scales(scaling: object, expected: str) -> None:
    text = text_of({"layer_scaling": scaling})
    assert section(text, "Layer scales").startswith(expected)
    assert ("raw norms" in section(text, "Not covered by ε")) == expected.startswith("Raw")


def test_trust() -> None:
    sharded = section(text_of({}), "Workers and trust")
    assert sharded.startswith("4 workers, noise placement sharded.")
    assert "sees bare the coordinates that this worker does not noise" in sharded
    assert "the network between them are trusted" in sharded
    per_worker = section(text_of({"noise_placement": "per_worker"}), "Workers and trust")
    assert "c workers who collude know c/N of the noise variance" in per_worker
    assert "accounted multiplier over √N" in per_worker
    assert "bare" not in per_worker
    alone = section(text_of({"workers": 1}), "Workers and trust")
    assert alone.startswith("One worker")
    assert "collude" not in alone


def test_noise_and_clipping() -> None:
    text = text_of({"divisor": 32.0, "unit": "example", "compression": "bf16"}, epochs=3, tau=0.1)
    assert "Multiplier 1 in epoch 0, decay: `LinearDecay(tau=0.1)`." in section(text, "Noise")
    assert "Accounted: 1 first, 0.833333 last." in section(text, "Noise")
    assert "published" not in text
    clipping = section(text, "Clipping")
    assert clipping.startswith("Norm 0.75, flat, all layers together. The gradient of every example")
    assert "sensitivity 1.5. The sum is divided by 32" in clipping
    assert "bf16" in clipping
    plain = text_of({"clipping": "per_layer", "noise_decay": None})
    assert "Norm 0.75, each layer by itself. The average gradient of a micro-batch" in section(plain, "Clipping")
    assert "decay: none" in section(plain, "Noise")
    assert "divided" not in plain
    assert "Gradients travel" not in plain


def test_the_published_algorithm_is_marked_and_accounted_with_its_real_multiplier() -> None:
    model = Bag()
    optimizer = private(model, noise="paper")
    optimizer.set_epoch(0)
    set_gradients(model)
    optimizer.step()
    made = card.make(optimizer.ledger, 1e-5)
    assert "the published algorithm as printed" in made.facts["Noise"]
    assert "max α" in made.facts["Noise"]
    assert made.schedule[0]["noise_multiplier"] == 0.5  # one worker: z/2
    delta = norm.cdf(1 - made.epsilon / 2) - math.exp(made.epsilon) * norm.cdf(-1 - made.epsilon / 2)
    assert delta == pytest.approx(1e-5, rel=1e-6)  # of the Gaussian mechanism with μ = 1/z = 2
    layered = text_of({"noise": "paper", "clipping": "per_layer"})
    assert "z/(2·√(N·K))." in layered
