"""Time and accuracy of the accountant.

    python -m benchmarks.accounting [--out benchmarks/results]

100 epochs of 1000 steps with linear decay, δ = 1e-5, and two levels of noise; calibration aims at ε = 1. The
accuracy is the distance to a grid with a sixteenth of the tolerance. Everything runs in one process.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import dp_accounting
import numpy as np
import scipy
from dp_accounting import pld as dp_pld

from benchmarks.harness import results
from benchmarks.harness.rows.accounting import (
    AccountedEpsilon,
    Accounting,
    Calibrated,
    DpAccounting,
    GrowingEpsilon,
    WithoutSampling,
)
from benchmarks.harness.settings import DECAY, DELTA, EPOCHS, STEPS, TARGET
from benchmarks.report.render import page
from edpsgd import accounting
from edpsgd.accounting import pld
from edpsgd.accounting.pld import Composition, Steps

RATES = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)
NOISE = (1.0, 4.0)  # multipliers of the first epoch


def timed(function: Callable[[], float]) -> tuple[float, float]:
    """The result, and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def training(z: float, rate: float, epochs: int = EPOCHS) -> list[Steps]:
    """The steps of a whole training."""
    return [Steps(z * DECAY(epoch), rate, STEPS) for epoch in range(epochs)]


def measure_epsilon(z: float, rate: float) -> AccountedEpsilon:
    """ε of a training, how long it takes, and how far it is above a finer grid."""
    steps = training(z, rate)
    epsilon, seconds = timed(lambda: accounting.compose(steps, DELTA))
    if rate == 1:
        return {"noise": z, "rate": rate, "epsilon": epsilon, "seconds": seconds, "above": 0.0}
    fine = Composition(pld.TOLERANCE / 16, math.inf).epsilon(steps, DELTA)
    return {"noise": z, "rate": rate, "epsilon": epsilon, "seconds": seconds, "above": epsilon / fine - 1}


def measure_calibration(rate: float) -> Calibrated:
    """The noise for a target, how long it takes to find, and the ε that it gives."""
    z, seconds = timed(lambda: accounting.calibrate(TARGET, DELTA, EPOCHS, DECAY, rate, STEPS))
    return {"rate": rate, "noise": z, "seconds": seconds, "epsilon": accounting.compose(training(z, rate), DELTA)}


def measure_without_sampling() -> WithoutSampling:
    """Milliseconds of one ε and one calibration, medians of different inputs, so that no cache helps."""
    factors = np.array([DECAY(epoch) for epoch in range(EPOCHS)])
    noisy = [partial(accounting.gaussian_epsilon, z * factors, DELTA) for z in np.linspace(1, 9, 201)]
    targets = [partial(accounting.calibrate, target, DELTA, EPOCHS, DECAY) for target in np.linspace(1, 9, 51)]
    epsilons = [timed(work)[1] for work in noisy]
    searches = [timed(work)[1] for work in targets]
    return {
        "epsilon_ms": 1e3 * statistics.median(epsilons),
        "epsilon_slowest_ms": 1e3 * max(epsilons),
        "calibrate_ms": 1e3 * statistics.median(searches),
    }


def measure_growth(rate: float) -> GrowingEpsilon:
    """ε after each epoch: with what was composed before, and from scratch."""
    steps, composition = training(1.0, rate), Composition()
    ends = range(1, EPOCHS + 1)
    kept = [timed(partial(composition.epsilon, steps[:n], DELTA)) for n in ends]
    anew = [timed(partial(Composition().epsilon, steps[:n], DELTA)) for n in ends]
    return {
        "rate": rate,
        "seconds": sum(s for _, s in kept),
        "slowest": max(s for _, s in kept),
        "seconds_anew": sum(s for _, s in anew),
        "slowest_anew": max(s for _, s in anew),
        "difference": max(abs(a / b - 1) for (a, _), (b, _) in zip(kept, anew, strict=True)),
    }


def measure_dp_accounting(rate: float = 1e-2, levels: int = 3) -> DpAccounting:
    """The same by dp-accounting at its default discretisation, for the first epochs only."""
    steps = training(1.0, rate, levels)

    def theirs() -> float:
        accountant = dp_pld.PLDAccountant()
        for s in steps:
            event = dp_accounting.GaussianDpEvent(s.noise_multiplier)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(s.sampling_rate, event), s.number)
        return float(accountant.get_epsilon(DELTA))

    their_epsilon, their_seconds = timed(theirs)
    epsilon, seconds = timed(lambda: accounting.compose(steps, DELTA))
    return {
        "rate": rate,
        "levels": levels,
        "dp_accounting_epsilon": their_epsilon,
        "dp_accounting_seconds_per_level": their_seconds / levels,
        "epsilon": epsilon,
        "seconds_per_level": seconds / levels,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures everything and writes the report."""
    flags = results.reducible("accounting", __doc__).parse_args(arguments)
    rates = RATES[3:4] if flags.reduced else RATES
    logging.getLogger("absl").setLevel(logging.ERROR)
    start = time.monotonic()
    measure_epsilon(1.0, 0.01)  # the first transforms of a process are slow
    found: Accounting = {
        "command": results.command("accounting", flags),
        "epsilon": [measure_epsilon(z, rate) for rate in rates for z in NOISE],
        "calibration": [measure_calibration(rate) for rate in rates],
        "without_sampling": measure_without_sampling(),
        "growth": [] if flags.reduced else [measure_growth(1e-2)],
        "dp_accounting": measure_dp_accounting(),
        "machine": {**results.machine(), "scipy": scipy.__version__},
        "minutes": (time.monotonic() - start) / 60,
    }
    results.save(flags.out, "accounting", found, page("accounting", found))


if __name__ == "__main__":
    main()
