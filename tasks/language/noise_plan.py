"""How a job draws its users, how much noise it needs, and what that will cost: before the first round."""

from __future__ import annotations

import math

from edpsgd import FixedSizeUsers, Ledger, PoissonUsers, accounting
from edpsgd.distributed.collectives import Collective
from edpsgd.sampling.users import Users
from tasks.common.flags import require
from tasks.language.configuration import Config, parse_denominator
from tasks.language.user_texts import UserData


def make_users(config: Config, data: UserData, collective: Collective) -> Users:
    """The sampler of a training."""
    counts = data.sizes().tolist()  # also where nobody is weighted: they tell the order of the users
    if config.cohort > len(data):
        raise ValueError(f"cohort must be at most the number of training users, {len(data)}, got {config.cohort:g}")
    denominator = parse_denominator(config.denominator)
    if config.sampling == "poisson":
        return PoissonUsers(
            counts,
            config.cohort / len(data),
            weight_cap=config.weight_cap,
            denominator=denominator,
            collective=collective,
            seed=config.seed,
        )
    require(config.cohort == int(config.cohort), "cohort", config.cohort, "a whole number with --sampling fixed")
    return FixedSizeUsers(
        counts,
        int(config.cohort),
        weight_cap=config.weight_cap,
        denominator=denominator,
        collective=collective,
        seed=config.seed,
    )


def noise_multiplier(config: Config, sampler: Users) -> float:
    """The noise multiplier that is given, or the one that the target ε needs."""
    if config.epsilon is None:
        return config.noise_multiplier
    rate = sampler.sampling_rate or 1.0
    if config.sampling == "fixed":
        return accounting.calibrate_fixed_size(config.epsilon, config.delta, rate, config.rounds)
    return accounting.calibrate(
        config.epsilon, config.delta, epochs=1, sampling_rate=rate, steps_per_epoch=config.rounds
    )


def plan_text(config: Config, data: UserData, collective: Collective) -> str:
    """The noise and what the whole training will cost, to print."""
    sampler = make_users(config, data, collective)
    z = noise_multiplier(config, sampler)
    if z == 0:
        norm = "none" if config.clip_norm is None else f"{config.clip_norm:g}"
        return f"no noise, no promise; clip norm {norm}"
    ledger = Ledger()
    ledger.begin_run({"unit": "user", "batches": sampler.describe(), "seeded": config.seed is not None})
    ledger.open_epoch(0, sampler.kind, sampler.sampling_rate)
    ledger.charge(z)
    ledger.events[0].steps = config.rounds
    clip_norm = config.clip_norm or math.nan  # the settings refuse noise without one
    std = z * sampler.reach * clip_norm / sampler.expected_batch
    planned = ledger.epsilon(config.delta)
    return f"noise multiplier {z:.6g}, noise on the mean update {std:.3g}\nplanned: {planned}"
