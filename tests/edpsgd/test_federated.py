"""User-level training: estimators, clipping, noise and accounting against independent computations."""

from __future__ import annotations

import copy
import errno
import itertools
import math
import os

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm
from torch import nn

import edpsgd
from edpsgd import ClippedDenominator, FedAvg, FedSGD, FixedDenominator, FixedSizeUsers, PoissonUsers, card
from edpsgd.ledger.records import RunRecord
from tests.helpers.common import SIGNIFICANCE, Spy
from tests.helpers.federation import Point, points_of, pushed, reference_round, towards, training
from tests.helpers.user_ledgers import user_ledger

S = 2.0
SIZES = [0, 40, 100, 250, 0, 400, 30, 90]  # examples of eight users


def mean_update(updates: list[torch.Tensor], sizes: list[int], denominator, kind=PoissonUsers) -> torch.Tensor:
    """What one real round, in which all users are drawn, does to the model."""
    model = Point()
    everybody = 1.0 if kind is PoissonUsers else len(sizes)
    users = kind(sizes, everybody, weight_cap=100, denominator=denominator, collective="local")
    federated = training(model, users, FedSGD(1.0), clip_norm=S)
    before = model.flat().detach().clone()
    federated.round(lambda user: [updates[user]], pushed(model))
    return model.flat().detach() - before


def distance(updates: list[torch.Tensor], sizes: list[int], denominator) -> float:
    """How far the last user moves the mean."""
    first, second = (mean_update(updates[:n], sizes[:n], denominator) for n in (len(updates) - 1, len(updates)))
    return float((first - second).norm())


def search(denominator) -> float:
    """The largest distance that a seeded search over updates and weights finds; opposite directions are tried first."""
    rng, axis = np.random.default_rng(3), torch.eye(5)[0]
    worst = 0.0
    for trial in range(60):
        others = int(rng.integers(1, 7))
        sizes = [100] * (others + 1) if trial % 2 else [int(n) for n in rng.integers(0, 200, others + 1)]
        lengths = [1e3] * others if trial % 3 else list(rng.uniform(0, 2 * S, others))
        noise = [torch.tensor(rng.normal(size=5), dtype=torch.float32) * (trial % 4 == 3) for _ in range(others)]
        updates = [length * axis + 20 * jitter for length, jitter in zip(lengths, noise, strict=True)]
        worst = max(worst, distance([*updates, -1e3 * axis], sizes, denominator))
    return worst


def test_one_user_moves_a_fixed_denominator_by_its_sensitivity() -> None:
    assert search(FixedDenominator(4.0)) == pytest.approx(S / 4.0, rel=1e-5)


def test_one_user_stays_within_the_bound_of_a_clipped_denominator() -> None:
    least = 3.0
    worst = search(ClippedDenominator(least))
    assert worst <= 2 * S / least
    assert worst == pytest.approx(2 * S / (least + 1), rel=1e-5)  # the supremum, where weights are at most 1


@pytest.mark.parametrize("denominator", [FixedDenominator(3.0), ClippedDenominator(3.0)])
def test_replacing_a_user_of_a_round_of_a_fixed_size(denominator) -> None:
    """Twice S over the denominator, for both: attained, and never exceeded."""
    rng, axis, worst = np.random.default_rng(4), torch.eye(5)[0], 0.0
    for trial in range(40):
        others = int(rng.integers(0, 6))
        updates = [1e3 * axis * (1 if trial % 2 else float(rng.choice([-1, 1]))) for _ in range(others)]
        sizes = [int(n) for n in rng.integers(0, 200, others)]
        last = [100, 100] if trial % 3 else [int(n) for n in rng.integers(0, 200, 2)]
        worlds = [
            mean_update([*updates, side * 1e3 * axis], [*sizes, size], denominator, FixedSizeUsers)
            for side, size in zip((1, -1), last, strict=True)
        ]
        worst = max(worst, float((worlds[0] - worlds[1]).norm()))
    assert worst == pytest.approx(2 * S / 3, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_stay_in_the_ball_in_half_precision(dtype) -> None:
    """Far from the origin, the last step into the ball is rounded to the precision of the parameters."""
    model = Point(200, 200).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    users = PoissonUsers([10, 10], 1.0, weight_cap=100, collective="local", denominator=ClippedDenominator(1e-3))
    federated = training(model, users, FedSGD(1.0), clip_norm=S)
    seen = []

    def look(was_clipped) -> None:
        seen.append(torch.cat([p.grad.float() for p in model.parameters()]).norm())

    federated.optimizer._accumulate_update = look
    with pytest.raises(RuntimeError, match="step refused"):
        federated.round(lambda user: [torch.full((400,), 3.0, dtype=dtype)], pushed(model))
    weight = 0.1 * 1e-3 / 0.2  # of the user, and the share of the denominator
    assert len(seen) == 2
    assert all(0 < float(norm) <= 1.01 * weight * S for norm in seen)


@pytest.mark.parametrize(
    ("users", "std"),
    [
        (PoissonUsers(8, 0.5, collective="local"), 1 / 4),
        (PoissonUsers(8, 0.5, denominator=FixedDenominator(6.0), collective="local"), 1 / 3),
        (PoissonUsers(8, 0.5, denominator=ClippedDenominator(4.0), collective="local"), 2 / 2),
        (FixedSizeUsers(8, 2, collective="local"), 2 / 2),
        (FixedSizeUsers(8, 2, denominator=ClippedDenominator(4.0), collective="local"), 2 / 1),
    ],
)
def test_noise_of_every_estimator(users, std) -> None:
    model = Point(30_000, 10_000)
    before = model.flat().detach().clone()
    federated = training(model, users, FedAvg(0.1), clip_norm=S, noise_multiplier=1.5, seed=7)
    federated.round(lambda user: [], towards(model))
    noise = (model.flat().detach() - before).double() / (1.5 * S * std)
    low, high = chi2.ppf([SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2], noise.numel())
    assert low < float(noise.square().sum()) < high
    assert federated.optimizer.ledger.events[0].noise_multiplier == 1.5


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("denominator", [FixedDenominator(), ClippedDenominator(3.0)])
@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_fedavg_is_the_reference(clipping, denominator, kind) -> None:
    def sampler():
        common = {"weight_cap": 100, "denominator": denominator, "collective": "local", "seed": 5}
        return PoissonUsers(SIZES, 0.6, **common) if kind == "poisson" else FixedSizeUsers(SIZES, 5, **common)

    model = Point()
    federated = training(model, sampler(), FedAvg(0.3, epochs=2), clip_norm=S, clipping=clipping)
    theta, again = [p.detach().clone() for p in model.parameters()], sampler()
    again.set_epoch(0)
    for drawn in again:
        weights = {user: min(SIZES[user] / 100, 1.0) for user in drawn}
        rate, total = (0.6 if kind == "poisson" else 5 / 8), sum(weights.values())
        divisor = 8 * rate if isinstance(denominator, FixedDenominator) else max(3.0 * rate, total)
        theta = reference_round(theta, weights, points_of, 0.3, 2, S, clipping == "per_layer", divisor)
        federated.round(points_of, towards(model))
        for parameter, expected in zip(model.parameters(), theta, strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


def test_fedsgd_with_one_user_is_sgd() -> None:
    model = Point()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    federated = training(model, FixedSizeUsers(8, 1, collective="local", seed=2), FedSGD(0.2))
    again = FixedSizeUsers(8, 1, collective="local", seed=2)
    again.set_epoch(0)
    for (user,) in again:
        federated.round(points_of, towards(model))
        optimizer.zero_grad()
        if points_of(user):
            towards(plain)(points_of(user)[0]).backward()
        optimizer.step()
        torch.testing.assert_close(model.flat(), plain.flat())


@pytest.mark.parametrize(
    "server",
    [
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=1e-2),
    ],
)
def test_servers(server) -> None:
    """The server's optimizer sees the mean update, with the opposite sign, as its gradient."""
    model, reference = Point(), Point()
    federated = training(model, PoissonUsers(3, 1.0, collective="local"), FedSGD(1.0), server(model.parameters()))
    optimizer = server(reference.parameters())
    for turn in range(3):
        updates = [torch.full((5,), float(user - turn)) for user in range(3)]
        federated.round(lambda user: [updates[user]], pushed(model))  # noqa: B023
        mean = -torch.stack(updates).mean(dim=0)
        reference.a.grad, reference.b.grad = mean[:3].clone(), mean[3:].clone()
        optimizer.step()
        torch.testing.assert_close(model.flat(), reference.flat())


def test_the_clip_norm_may_follow_the_training() -> None:
    """With the multiplier, and so with ε, unchanged (section 3 of the paper)."""
    model = Point(40_000, 2)
    federated = training(model, PoissonUsers(4, 0.5, collective="local"), FedAvg(0.1), clip_norm=S, noise_multiplier=1)
    stds = []
    for clip_norm in (S, S / 4):
        federated.optimizer.clip_norm = clip_norm
        before = model.a.detach().clone()
        federated.round(lambda user: [], towards(model))
        stds.append(float((model.a.detach() - before).std()))
    assert stds[0] / stds[1] == pytest.approx(4.0, rel=0.05)
    assert {event.noise_multiplier for event in federated.optimizer.ledger.events} == {1.0}
    assert federated.optimizer.state_dict()["edpsgd"]["clip_norm"] == S / 4
    with pytest.raises(ValueError, match="clip_norm must be a finite number > 0"):
        federated.optimizer.clip_norm = 0.0
    assert "`clip_norm`: 2.0, then 0.5" in card.make(federated.optimizer.ledger, 1e-5).markdown()
    assert [event.steps for event in federated.optimizer.ledger.events] == [2]


def test_users_without_data_and_rounds_without_users() -> None:
    model = Point()
    before = model.flat().detach().clone()
    federated = training(model, PoissonUsers(3, 1e-9, rounds_per_epoch=2, collective="local"), FedAvg(0.1))
    for _ in range(3):
        federated.round(lambda user: pytest.fail("nobody is drawn"), towards(model))
    assert torch.equal(model.flat().detach(), before)
    assert [event.steps for event in federated.optimizer.ledger.events] == [2, 1]
    everyone = training(model, PoissonUsers(3, 1.0, collective="local"), FedAvg(0.1))
    everyone.round(lambda user: [], towards(model))
    assert torch.equal(model.flat().detach(), before)


def test_an_update_that_is_not_finite_counts_as_zero() -> None:
    model = Point()
    before = model.flat().detach().clone()
    federated = training(model, PoissonUsers(2, 1.0, collective="local"), FedSGD(1.0), clip_norm=S)
    updates = [torch.full((5,), math.nan), torch.ones(5)]
    with pytest.warns(UserWarning, match="held NaN"):
        federated.round(lambda user: [updates[user]], pushed(model))
    clipped = updates[1] * S / math.sqrt(5)
    torch.testing.assert_close(model.flat().detach() - before, clipped / 2)


def test_a_failing_user_leaves_the_model_as_it_was() -> None:
    model = Point()
    before = model.flat().detach().clone()
    federated = training(model, PoissonUsers(1, 1.0, collective="local"), FedAvg(0.1))

    def broken(user: int):
        yield torch.ones(3, 5)
        raise OSError("gone")

    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            federated.round(broken, towards(model))
        assert torch.equal(model.flat().detach(), before)
    federated.round(lambda user: [torch.ones(3, 5)], towards(model))  # the same round, tried again
    torch.testing.assert_close(model.flat().detach(), before + 0.1 * (1 - before))
    assert federated.optimizer.ledger.events[0].steps == 1


def test_a_round_whose_entry_could_not_be_written_can_be_tried_again(tmp_path, monkeypatch) -> None:
    model = Point()
    users = FixedSizeUsers(8, 2, collective="local")
    federated = training(model, users, FedAvg(0.1), ledger=tmp_path / "ledger.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        for _ in range(3):
            with pytest.raises(OSError, match="cannot be written"):
                federated.round(points_of, towards(model))
    for _ in range(4):
        federated.round(points_of, towards(model))
    assert users.position == 4


def test_a_round_that_is_tried_again_asks_the_others_once() -> None:
    """They did not fail, and wait for the sum."""

    class Counts(Spy):
        gathered = 0

        def gather(self, value):
            self.gathered += 1
            return super().gather(value)

    model, spy = Point(), Counts()
    users = PoissonUsers(1, 1.0, denominator=ClippedDenominator(1.0), collective=spy)
    federated = training(model, users, FedAvg(0.1), collective=spy)
    before = spy.gathered

    def broken(user: int):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        federated.round(broken, towards(model))
    for _ in range(2):
        federated.round(lambda user: [torch.ones(3, 5)], towards(model))
    assert spy.gathered == before + 2  # once for each of two rounds


def test_a_gradient_that_somebody_left_behind_is_no_user() -> None:
    model = Point()
    before = model.flat().detach().clone()
    federated = training(model, PoissonUsers(3, 1e-9, collective="local"), FedAvg(0.1))
    towards(model)(torch.ones(3, 5)).backward()
    federated.round(lambda user: [], towards(model))
    assert torch.equal(model.flat().detach(), before)


@pytest.mark.parametrize("sampler", [PoissonUsers, FixedSizeUsers])
def test_going_on_from_a_checkpoint(sampler) -> None:
    def start():
        model = Point()
        second = 0.5 if sampler is PoissonUsers else 3
        users = sampler(8, second, rounds_per_epoch=3, collective="local", seed=1)
        return model, training(model, users, FedAvg(0.1), clip_norm=S, noise_multiplier=1.0, seed=4)

    (whole, one), (model, two) = start(), start()
    for _ in range(5):
        one.round(points_of, towards(whole))
    for _ in range(2):
        two.round(points_of, towards(model))
    state, weights = two.optimizer.state_dict(), copy.deepcopy(model.state_dict())
    model, three = start()
    model.load_state_dict(weights)
    three.optimizer.load_state_dict(state)
    for _ in range(3):
        three.round(points_of, towards(model))
    assert torch.equal(whole.flat(), model.flat())
    assert [e.steps for e in three.optimizer.ledger.events] == [3, 2]


TABLE_1 = {
    (10**5, 10**2, 1.0): (0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50),
    (10**6, 10**1, 1.0): (0.68, 0.69, 0.69, 0.69, 0.69, 0.72, 0.73),
    (10**6, 10**3, 1.0): (1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13),
    (10**6, 10**4, 1.0): (1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01),
    (10**6, 10**3, 3.0): (0.47, 0.47, 0.48, 0.48, 0.49, 0.67, 1.95),
    (10**9, 10**3, 1.0): (0.84, 0.84, 0.84, 0.85, 0.88, 0.88, 0.88),
}


def by_method(ledger: edpsgd.Ledger, delta: float) -> dict[str, float]:
    return {b.method.partition(",")[0]: b.epsilon for b in ledger.report(delta).bounds}


@pytest.mark.parametrize(("row", "printed"), TABLE_1.items())
def test_table_1_of_the_paper(row, printed) -> None:
    users, cohort, z = row
    for power, figure in list(enumerate(printed))[::3]:
        found = by_method(user_ledger("poisson", cohort / users, z, 10**power), users**-1.1)
        assert found["moments accountant"] == pytest.approx(figure, abs=0.0051)
        assert found["PLD"] < found["moments accountant"]


@pytest.mark.parametrize(
    ("users", "cohort", "figure"),
    [
        (763430, 5000, 4.634),
        (763430, 1667, 2.314),
        (763430, 1250, 2.038),
        (10**8, 5000, 1.152),
        (10**8, 1667, 0.991),
        (10**8, 1250, 0.987),
    ],
)
def test_table_2_of_the_paper(users, cohort, figure) -> None:
    found = by_method(user_ledger("poisson", cohort / users, 1.0, 5000), 1e-9)
    assert found["moments accountant"] == pytest.approx(figure, abs=0.00051)
    assert found["PLD"] < figure


def test_rounds_of_a_fixed_size_are_accounted_as_such() -> None:
    """Less sampling costs less, no sampling is the Gaussian mechanism, and the bound is that of replacing a user."""
    epsilons = [float(user_ledger("fixed_size", q, 1.0, 100).epsilon(1e-6)) for q in (0.001, 0.01, 0.1)]
    whole = edpsgd.Ledger()
    whole.open_epoch(None)
    whole.charge(1.0 / math.sqrt(100))
    assert all(a < b for a, b in itertools.pairwise([*epsilons, float(whole.epsilon(1e-6))]))
    bound = user_ledger("fixed_size", 1.0, 1.0, 100).epsilon(1e-6)
    assert bound.epsilon == pytest.approx(float(whole.epsilon(1e-6)), rel=1e-9)
    assert bound.neighbours == "replace one user"


@pytest.mark.parametrize(("q", "z"), [(0.3, 0.5), (0.05, 1.0), (0.5, 3.0)])
def test_fixed_size_covers_a_user_who_is_turned_round(q, z) -> None:
    """A round of one drawn from 1/q users: the others contribute nothing, this one +S or −S. δ by integration."""
    delta = 1e-5
    epsilon = float(user_ledger("fixed_size", q, z, 1).epsilon(delta))
    at = np.linspace(-20 * z - 1, 20 * z + 1, 400_001)  # sums, with 2S as the unit
    one, two = ((1 - q) * norm.pdf(at, 0, z) + q * norm.pdf(at, side, z) for side in (0.5, -0.5))
    excess = float(np.maximum(one - math.exp(epsilon) * two, 0).sum() * (at[1] - at[0]))
    assert 0 < excess < delta


def test_units_are_not_mixed() -> None:
    ledger = user_ledger("poisson", 0.1, 1.0, 5)
    with pytest.raises(edpsgd.LedgerError, match="users and steps on examples"):
        ledger.begin_run({"unit": "example"})
    ledger.runs.append(RunRecord(unit="example"))  # as in a file of an earlier version
    with pytest.raises(edpsgd.LedgerError, match="users and steps on examples"):
        ledger.epsilon(1e-5)
    with pytest.raises(edpsgd.LedgerError, match="other neighbours|of other"):
        user_ledger("poisson", 0.1, 1.0, 5).open_epoch(1, "fixed_size", 0.1)


def test_the_card_speaks_of_users() -> None:
    model = Point()
    users = FixedSizeUsers(SIZES, 3, weight_cap=100, collective="local")
    federated = training(model, users, FedAvg(0.1), noise_multiplier=1.0)
    federated.round(points_of, towards(model))
    page = card.make(federated.optimizer.ledger, 1e-5).markdown()
    for text in ("replace one user", "One user: all examples", "3 of 8 users", "number of examples over 100"):
        assert text in page


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonUsers(5, 0.5, weight_cap=10, collective="local"), "weight_cap needs the number of examples"),
        (lambda: PoissonUsers([5, -1], 0.5, weight_cap=10, collective="local"), "a whole number >= 0 for each"),
        (lambda: PoissonUsers([5, math.nan], 0.5, collective="local"), "a whole number >= 0 for each"),
        (lambda: FixedSizeUsers("many", 2, collective="local"), "got str"),
        (lambda: PoissonUsers(0, 0.5, collective="local"), "users must be an int >= 1"),
        (lambda: FixedSizeUsers(5, 6, collective="local"), "at most the number of users, 5"),
        (lambda: FixedSizeUsers(5, 2, denominator=3.0, collective="local"), "denominator must be"),
        (lambda: ClippedDenominator(0.0), "least_weight must be a finite number > 0"),
        (lambda: FixedDenominator(math.inf), "total_weight must be a finite number > 0"),
        (lambda: FedAvg(0.0), "learning_rate must be a finite number > 0"),
        (lambda: FedAvg(0.1, epochs=0), "epochs of FedAvg must be an int >= 1"),
        (lambda: training(Point(), PoissonUsers(5, 0.5, collective="local"), 0.1), "local must be FedAvg"),
        (lambda: training(nn.BatchNorm1d(3), PoissonUsers(5, 0.5, collective="local"), FedSGD(1.0)), "running stat"),
        (
            lambda: training(Point(), edpsgd.PoissonBatches(5, 0.5, unit="example", collective="local"), FedSGD(1.0)),
            "does not fit the sampler",
        ),
        (lambda: training(Point(), None, FedSGD(1.0)), "needs batches: PoissonUsers"),
    ],
)
def test_bad_arguments(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
