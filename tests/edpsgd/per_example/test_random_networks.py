"""Clipped sums of random networks against a loop; and that the networks are what they should be."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.graph import shapes
from edpsgd.per_example.plan import Planner
from edpsgd.per_example.rules import lstm
from tests import fuzz
from tests.helpers.networks.batches import HUGE, make_batch
from tests.helpers.networks.ends import BEGINS, LOSSES
from tests.helpers.networks.network import KINDS, Network, Plan, make_plan
from tests.helpers.networks.trial import first_failure, run
from tests.helpers.unit_loop import gradients_of, trained

NETWORKS, TOGETHER = 300, 10


@pytest.mark.parametrize("first", range(0, NETWORKS, TOGETHER))
def test_clipped_sums_and_norms_are_those_of_a_loop(first: int) -> None:
    outcomes = [run(make_plan(seed)) for seed in range(first, first + TOGETHER)]
    failed = [str(one) for one in outcomes if one.verdict != "right"]
    assert not failed, "\n".join(failed)


# ---------------------------------------------------------------- the networks


def test_kinds_of_operations() -> None:
    """Each in at least 2 % of the networks, and in some of those that are run here."""
    plans = [make_plan(seed) for seed in range(5000)]
    shares = Counter(kind for plan in plans for kind in set(plan.kinds))
    known = {*KINDS, *BEGINS, *LOSSES}
    assert set(shares) == known
    assert len(KINDS) >= 40
    assert min(shares.values()) >= 0.02 * len(plans), shares.most_common()[-5:]
    assert {kind for plan in plans[:NETWORKS] for kind in plan.kinds} == known
    assert {len(plan.kinds) for plan in plans} == set(range(2, 9))


def test_batches() -> None:
    """Half of them with as many examples as tokens, and one of those after six others."""
    plans = [make_plan(seed) for seed in range(300)]
    for plan in plans:
        sizes = [size for size, _ in plan.batches]
        equal = [place for place, (examples, tokens) in enumerate(sizes) if examples == tokens]
        assert 2 * len(equal) == len(sizes)
        assert equal[-1] >= 6
        assert len(set(sizes[: equal[-1]])) > 3
        assert 1 in {examples for examples, _ in sizes}
    batches = [batch for plan in plans for batch in plan.data()]
    assert 0.1 < sum(batch.units is not None for batch in batches) / len(batches) < 0.3
    assert 0.2 < sum(bool((batch.scale == HUGE).any()) for batch in batches) / len(batches) < 0.4
    for share in ("by_optimizer", "per_layer"):
        assert 0.1 < sum(getattr(plan, share) for plan in plans) / len(plans) < 0.3
    assert {plan.dtype for plan in plans} == {torch.float32, torch.float64}


def small_plan(kinds: list[str], dim: int, seed: int, **more: object) -> Plan:
    chance = random.Random(f"{kinds} {seed}")
    operations = tuple((kind, chance.getrandbits(32)) for kind in kinds)
    common = {"dim": dim, "operations": operations, "dtype": torch.float64, **more}
    return replace(make_plan(seed), **common)


def assert_sound(plan: Plan, sizes: list[tuple[int, int]]) -> None:
    """Every loss is what it is without the other examples, and so is its gradient."""
    network = Network(plan)
    network.wake()
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    parameters = list(trained(network).values())
    for number, size in enumerate(sizes):
        batch = make_batch(size, plan.seed + number, plan.width, plan.dtype)
        losses = network(batch)
        together = gradients_of(losses, parameters, torch.arange(len(losses)), len(losses))
        for example in range(batch.examples):
            own = network(batch.alone(example))
            [alone] = gradients_of(own, parameters, torch.zeros(1, dtype=torch.int64), 1)
            torch.testing.assert_close(own[0], losses[example])
            torch.testing.assert_close(alone, together[example], rtol=1e-6, atol=1e-7 * float(batch.scale[example]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_operation_lets_examples_see_each_other(kind: str) -> None:
    """In both layouts, and in all forms that it has."""
    for seed in range(6):
        plan = small_plan(["linear", kind], seed % 2, seed, begin="embedding", losses="sum of products")
        assert_sound(plan, [(3, 4), (3, 3)])


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("begin", BEGINS)
def test_no_beginning_and_no_end_either(begin: str, losses: str) -> None:
    for seed in range(4):
        assert_sound(small_plan(["linear"], seed % 2, seed, begin=begin, losses=losses), [(4, 2), (3, 3)])


def test_networks_are_sound_as_a_whole() -> None:
    for seed in range(40):
        assert_sound(replace(make_plan(seed), dtype=torch.float64), [(2, 3), (3, 3)])


# ---------------------------------------------------------------- what is found

PLANTED = {}


def planted(plant):
    """A defect in the engine: a function of monkeypatch."""
    PLANTED[plant.__name__] = plant
    return plant


@planted
def norms_of_other_examples_after_some_batches(monkeypatch) -> None:
    """In the first layer only, and only once four sizes of batches have been seen."""
    right, seen = UnitGradients.backward, dict[int, set[int]]()

    def wrong(self, losses, units=None, count=None):
        norms = right(self, losses, units, count)
        sizes = seen.setdefault(id(self), set())
        sizes.add(len(losses))
        if len(sizes) >= 4:
            norms[:, 0] = norms[:, 0].roll(1)
        return norms

    monkeypatch.setattr(UnitGradients, "backward", wrong)


@planted
def a_layer_that_counts_too_little(monkeypatch) -> None:
    right = UnitGradients.backward

    def wrong(self, *arguments):
        norms = right(self, *arguments)
        norms[:, -1] *= 0.9
        return norms

    monkeypatch.setattr(UnitGradients, "backward", wrong)


@planted
def a_sum_that_lacks_an_example(monkeypatch) -> None:
    right = UnitGradients.add_weighted_

    def wrong(self, sums, factors):
        factors = factors.clone()
        factors[-1] *= 0.9
        right(self, sums, factors)

    monkeypatch.setattr(UnitGradients, "add_weighted_", wrong)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found_within_300_networks(name: str, monkeypatch) -> None:
    PLANTED[name](monkeypatch)
    found = first_failure(range(NETWORKS))
    assert found is not None
    assert found.wrong, str(found)


def test_layouts_of_earlier_batches_are_found_within_300_networks(monkeypatch) -> None:
    """What the engine once did: a way in which examples lay before is taken wherever the shape allows it."""
    right, ways = Planner.find_layout, dict[tuple[object, ...], int]()

    def remembered(self, use, rule):
        layout, shape = right(self, use, rule), shapes(use.receiver)[0]
        if layout is None or use.node.name() == lstm.NAME:
            return layout
        key = (id(self.parameters), use.node.name(), use.slot, len(shape))
        dim = ways.setdefault(key, layout.dim)
        if shape[dim] == self.attribution.graph.examples and rule.allows(use, dim):
            return self.share_layout(dim, torch.arange(shape[dim]), shape[dim])
        return layout

    monkeypatch.setattr(Planner, "find_layout", remembered)
    assert any(run(make_plan(seed)).wrong for seed in range(NETWORKS))


def test_errors_are_counted(monkeypatch) -> None:
    """Those that the library raises by itself are stops, others crashes."""
    plan = small_plan(["linear"], 0, 1, begin="embedding", losses="sum of products", by_optimizer=False)
    with monkeypatch.context() as patch:
        patch.setattr(UnitGradients, "release", lambda self: {}["nothing"])
        assert run(plan).verdict == "crashed"
    with monkeypatch.context() as patch:
        patch.setattr(UnitGradients, "backward", lambda self, *_: torch.ones(1, 1))
        assert run(plan).verdict == "stopped"  # add_weighted_ says that backward must come first


def test_the_command_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch) -> None:
    record = tmp_path / "record.jsonl"
    seen: list[int] = []

    def noted(plan: Plan):
        seen.append(plan.seed)
        return run(replace(plan, batches=plan.batches[:1]))

    monkeypatch.setattr(fuzz, "run", noted)
    fuzz.main(["--networks", "3", "--record", str(record)])
    record.write_text(record.read_text()[:-10])  # killed while it wrote
    fuzz.main(["--networks", "5", "--record", str(record)])
    assert seen == [0, 1, 2, 2, 3, 4]
    assert "5 networks, " in capsys.readouterr().out
