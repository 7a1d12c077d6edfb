"""The noise that reaches the parameters, against privacy.md section 3, and its independence."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch

import edpsgd
from tests.helpers.common import (
    FRESH,
    SIGNIFICANCE,
    Bag,
    Spy,
    assert_std,
    assert_uncorrelated,
    layers_of,
    private,
    set_gradients,
)

SCALES = {"p0": 1.0, "p1": 2.0, "p2": 4.0}
C, Z = 0.5, 0.7


def alphas(scaled: bool) -> list[float]:
    if not scaled:
        return [1.0, 1.0, 1.0]
    rms = math.sqrt((1 + 4 + 16) / 3)
    return [1 / rms, 2 / rms, 4 / rms]


def expected_std(noise, clipping, scaled, n, k, layer, z) -> float:
    """Of the mean over N·K micro-batches."""
    if noise == "paper":
        return C * z / math.sqrt(n * k) / (n * k)
    return 2 * C * z * (1.0 if clipping == "per_layer" else alphas(scaled)[layer]) / (n * k)


def run_step(optimizer, model, k: int) -> dict[str, torch.Tensor]:
    """What one step on zero gradients does to the parameters: nothing but noise."""
    before = layers_of(model)
    for _ in range(k):
        set_gradients(model)
        optimizer.accumulate()
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("noise", ["calibrated", "paper"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("placement", ["sharded", "per_worker"])
@pytest.mark.parametrize("k", [1, 3])
def test_std_of_every_layer(workers, noise, clipping, scaled, placement, k) -> None:
    model = Bag()
    optimizer = private(
        model,
        clip_norm=C,
        noise_multiplier=Z,
        noise=noise,
        clipping=clipping,
        layer_scaling=SCALES if scaled else None,
        noise_placement=placement,
        seed=11,
    )
    moved = run_step(optimizer, model, k)
    for layer, value in enumerate(moved.values()):
        assert_std(value, expected_std(noise, clipping, scaled, workers.size, k, layer, Z))
    largest = 1.0 if clipping == "per_layer" else max(alphas(scaled))
    effective = Z if noise == "calibrated" else Z / (2 * math.sqrt(workers.size * k) * largest)
    assert optimizer.ledger.events[0].noise_multiplier == pytest.approx(effective, rel=1e-12)


@pytest.mark.parametrize(
    ("decay", "factor"),
    [
        (None, lambda t: 1.0),
        (edpsgd.LinearDecay(0.3), lambda t: 1 / (1 + 0.3 * t)),
        (edpsgd.ExponentialDecay(0.4), lambda t: math.exp(-0.4 * t)),
        (lambda t: 2.0**t, lambda t: 2.0**t),
    ],
    ids=["none", "linear", "exponential", "callable"],
)
def test_decay(workers, decay, factor) -> None:
    model = Bag()
    optimizer = private(model, clip_norm=C, noise_multiplier=Z, noise_decay=decay, seed=5)
    for epoch in (0, 1, 4):
        optimizer.set_epoch(epoch)
        for layer, value in enumerate(run_step(optimizer, model, 1).values()):
            assert_std(value, expected_std("calibrated", "flat", False, workers.size, 1, layer, Z * factor(epoch)))
    assert [e.noise_multiplier for e in optimizer.ledger.events] == pytest.approx([Z * factor(t) for t in (0, 1, 4)])


@pytest.mark.parametrize("decay", [None, edpsgd.LinearDecay(0.5), edpsgd.ExponentialDecay(0.5)])
def test_the_example_of_section_3(workers, decay) -> None:
    """The multiplier that the paper's noise really has, from its definition."""
    model = Bag()
    scales = {"p0": 0.378, "p1": 0.756, "p2": 1.512}
    optimizer = private(model, noise="paper", layer_scaling=scales, noise_decay=decay, seed=3)
    optimizer.set_epoch(2)
    for _ in range(8):
        optimizer.accumulate()
    optimizer.step()
    z = 1.0 if decay is None else decay(2)
    rms = math.sqrt((0.378**2 + 0.756**2 + 1.512**2) / 3)
    expected = z / (2 * math.sqrt(8 * workers.size) * 1.512 / rms)
    assert optimizer.ledger.events[-1].noise_multiplier == pytest.approx(expected, rel=1e-9)
    if workers.size == 1 and decay is None:
        assert expected == pytest.approx(0.11692679, rel=1e-6)


def own_noise(placement: str, steps: int = 2, **settings) -> tuple[list[torch.Tensor], Spy]:
    """What this worker alone put on the wire, step by step."""
    model, spy = Bag(), Spy()
    optimizer = private(model, collective=spy, noise_placement=placement, **settings)
    for _ in range(steps):
        optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    return [sent[:count] for sent in spy.sent], spy


@pytest.mark.parametrize(("seed", "significance"), [(None, FRESH), (7, SIGNIFICANCE)], ids=["fresh", "seeded"])
def test_workers_and_steps_are_independent(workers, seed, significance) -> None:
    noise, _ = own_noise("per_worker", steps=3, seed=seed)
    everyone = [sent for worker in workers.gather(noise) for sent in worker]
    for a, b in itertools.combinations(everyone, 2):
        assert_uncorrelated(a, b, significance)
    for sent in everyone:
        assert_std(sent, 2.0 / math.sqrt(workers.size) / workers.size, significance)


@pytest.mark.parametrize(("seed", "significance"), [(None, FRESH), (7, SIGNIFICANCE)], ids=["fresh", "seeded"])
def test_shards_cover_everything_once_and_are_independent(workers, seed, significance) -> None:
    noise, _ = own_noise("sharded", steps=2, seed=seed)
    shards = workers.gather(noise)
    for step in range(2):
        support = torch.stack([worker[step] != 0 for worker in shards]).sum(0)
        assert (support == 1).all()
    parts = [worker[step][worker[step] != 0] for worker in shards for step in range(2)]
    shortest = min(map(len, parts))
    for a, b in itertools.combinations(parts, 2):
        assert_uncorrelated(a[:shortest], b[:shortest], significance)
    for part in parts:
        assert_std(part, 2.0 / workers.size, significance)


@pytest.mark.parametrize("way", ["resume", "same process", "deepcopy", "pickle"])
@pytest.mark.parametrize("placement", ["sharded", "per_worker"])
def test_fresh_noise_after_copies_and_resumes(workers, way, placement) -> None:
    """A checkpoint of worker 0, loaded everywhere, must not line up the workers' noise nor repeat it."""
    model, spy = Bag(), Spy()
    optimizer = private(model, collective=spy, noise_placement=placement)
    optimizer.step()
    checkpoint = workers.gather(optimizer.state_dict())[0]
    optimizer.step()
    if way == "resume":
        again = private(model, collective=spy, noise_placement=placement)
        again.load_state_dict(checkpoint)
    elif way == "same process":
        again = optimizer
        again.load_state_dict(checkpoint)
    elif way == "deepcopy":
        again = copy.deepcopy(optimizer)
    else:
        again = pickle.loads(pickle.dumps(optimizer))
    again.step()
    count = sum(p.numel() for p in model.parameters())
    sent = again._collective.sent
    assert len(sent) == 3
    everyone = [message[:count] for worker in workers.gather(sent) for message in worker]
    for a, b in itertools.combinations(everyone, 2):
        both = (a != 0) & (b != 0)
        if both.any():
            assert_uncorrelated(a[both], b[both], FRESH)


def test_without_a_seed_runs_differ_with_one_they_repeat(workers) -> None:
    (first,), _ = own_noise("per_worker", steps=1)
    (second,), _ = own_noise("per_worker", steps=1)
    (third,), _ = own_noise("per_worker", steps=1, seed=4)
    (fourth,), _ = own_noise("per_worker", steps=1, seed=4)
    assert_uncorrelated(first, second, FRESH)
    assert torch.equal(third, fourth)


def test_missing_gradients_are_noised_like_the_others(workers) -> None:
    model = Bag()
    optimizer = private(model, seed=2)
    if workers.rank == 0:
        model.p0.grad = torch.zeros_like(model.p0)  # p1 and p2 get none here, and nothing gets one elsewhere
    optimizer.step()
    for parameter in model.parameters():
        assert_std(parameter.detach(), 2.0 / workers.size)


def test_frozen_parameters_are_left_alone(workers) -> None:
    model = Bag()
    model.p1.requires_grad_(False)
    optimizer = private(model, seed=2)
    optimizer.step()
    assert model.p1.abs().sum() == 0
    assert_std(model.p0.detach(), 2.0 / workers.size)


@pytest.mark.parametrize("private_scales", [False, True])
def test_first_step_norms(workers, private_scales) -> None:
    """The first step measures and moves nothing; then noise follows the measured scales."""
    z_alpha = 0.01 if private_scales else None
    model = Bag()
    optimizer = private(model, clip_norm=C, noise_multiplier=Z, layer_scaling=edpsgd.FirstStepNorms(z_alpha), seed=9)
    optimizer.set_epoch(0)
    for factor, parameter in zip((1.0, 2.0, 0.0001), model.parameters(), strict=True):
        parameter.grad = torch.full_like(parameter, factor * (1 + workers.rank) / math.sqrt(parameter.numel()))
    optimizer.step()
    assert all(p.abs().sum() == 0 for p in model.parameters())
    events = optimizer.ledger.events
    assert [(e.kind, e.noise_multiplier, e.steps) for e in events] == [
        ("gradients", None, 0),
        ("layer_norms", z_alpha or 0.0, 1),
    ]
    moved = run_step(optimizer, model, 1)
    ideal = [1.0, 2.0, 0.05 * math.sqrt(5 / 3)]
    rms = math.sqrt(sum(a * a for a in ideal) / 3)
    for value, alpha in zip(moved.values(), ideal, strict=True):
        measured = value.double().std() / (2 * C * Z / workers.size)
        assert float(measured) == pytest.approx(alpha / rms, rel=0.1)
    assert events[0].steps == 1


@pytest.mark.parametrize("k", [1, 3])
def test_what_private_scales_release(workers, k) -> None:
    """Layer norms at length 1 for each micro-batch, however large the gradient, plus noise of std √2·z on the sum."""
    z, sizes = 0.5, [2] * 3000
    model, spy = Bag(sizes), Spy()
    optimizer = private(model, layer_scaling=edpsgd.FirstStepNorms(z), collective=spy, seed=1)
    for _ in range(k):
        set_gradients(model, 10.0 + workers.rank)
        optimizer.accumulate()
    optimizer.step()
    sent = spy.sent[0][: len(sizes)]
    contributions = torch.full_like(sent, k / math.sqrt(len(sizes)))
    assert_std(sent - contributions, math.sqrt(2) * z / math.sqrt(workers.size))
    total = torch.stack(workers.gather(sent)).sum(0)
    assert_std(total - workers.size * contributions, math.sqrt(2) * z)
    assert spy.sent[0].numel() < 2 * len(sizes)  # no gradient in the message
