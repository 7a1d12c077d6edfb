"""Users of a round spread over the workers: the sum is that of one process, and so is the noise."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from edpsgd import ClippedDenominator, FedAvg, FixedDenominator, FixedSizeUsers, PoissonUsers
from edpsgd.distributed.launchers import resolve
from tests.helpers.common import SIGNIFICANCE
from tests.helpers.federation import Point, points_of, reference_round, towards, training

SIZES = [0, 40, 100, 250, 0, 400, 30, 90]


@pytest.mark.parametrize("denominator", [FixedDenominator(), ClippedDenominator(3.0)])
@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_workers_share_the_users_of_a_round(denominator, kind) -> None:
    """Compared with the reference on all users that the workers drew, each its own."""

    def sampler():
        common = {"weight_cap": 100, "denominator": denominator, "seed": 5}
        return PoissonUsers(SIZES, 0.6, **common) if kind == "poisson" else FixedSizeUsers(SIZES, 5, **common)

    workers, model, again = resolve("auto"), Point(), sampler()
    federated = training(model, sampler(), FedAvg(0.3), clip_norm=2.0)
    theta = [p.detach().clone() for p in model.parameters()]
    again.set_epoch(0)
    for own in again:
        shares = workers.gather(own)
        drawn = sorted(user for share in shares for user in share)
        assert all(user % workers.size == rank for rank, share in enumerate(shares) for user in share)
        assert kind == "poisson" or len(drawn) == 5
        weights = {user: min(SIZES[user] / 100, 1.0) for user in drawn}
        rate = 0.6 if kind == "poisson" else 5 / 8
        divisor = 8 * rate if isinstance(denominator, FixedDenominator) else max(3.0 * rate, sum(weights.values()))
        theta = reference_round(theta, weights, points_of, 0.3, 1, 2.0, False, divisor)
        federated.round(points_of, towards(model))
        for parameter, expected in zip(model.parameters(), theta, strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placement", ["sharded", "per_worker"])
def test_the_noise_of_a_round_does_not_depend_on_the_workers(placement) -> None:
    model = Point(20_000, 5_000)
    before = model.flat().detach().clone()
    users = FixedSizeUsers(8, 2, seed=1)
    federated = training(
        model, users, FedAvg(0.1), clip_norm=2.0, noise_multiplier=1.5, noise_placement=placement, seed=7
    )
    federated.round(lambda user: [], towards(model))
    noise = (model.flat().detach() - before).double() / (1.5 * 2 * 2.0 / 2)
    low, high = chi2.ppf([SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2], noise.numel())
    assert low < float(noise.square().sum()) < high
    assert len({float(value) for value in resolve("auto").gather(float(model.flat().detach().sum()))}) == 1


@pytest.mark.parametrize("is_seeded", [False, True])
def test_workers_draw_the_same_round_after_a_broadcast(hvd, is_seeded) -> None:
    """Worker 0 alone has loaded the checkpoint."""

    def build():
        return training(Point(), FixedSizeUsers(8, 2, seed=3 if is_seeded else None), FedAvg(0.1))

    workers, first = resolve("auto"), build()
    first.round(points_of, towards(first.model))
    checkpoint = workers.gather(first.optimizer.state_dict())[0]
    resumed = build()
    if workers.rank == 0:
        resumed.optimizer.load_state_dict(checkpoint)
    hvd.broadcast_optimizer_state(resumed.optimizer, root_rank=0)
    drawn = next(iter(resumed.users))
    assert len([user for share in workers.gather(drawn) for user in share]) == 2
    resumed = build()
    resumed.optimizer.load_state_dict(checkpoint)
    resumed.round(points_of, towards(resumed.model))


def test_workers_that_draw_different_rounds_are_found_out() -> None:
    workers, users = resolve("auto"), FixedSizeUsers(8, 2)
    if workers.size == 1:
        pytest.skip("needs several workers")
    federated = training(Point(), users, FedAvg(0.1))
    federated.optimizer.set_epoch(0)
    users.moves += workers.rank  # as if some had loaded more checkpoints
    federated.optimizer._bookkeeping._moves = users.moves
    users._key = users._epoch_key()
    with pytest.raises(ValueError, match="disagree on the draws"):
        federated.round(points_of, towards(federated.model))
