"""From a target ε to its noise, also with further releases such as measured layer scales."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from scipy.stats import norm

from edpsgd import ExponentialDecay, LinearDecay, accounting
from edpsgd.accounting import (
    calibrate,
    calibration,
    gaussian_epsilon,
    poisson_epsilon,
    zcdp_epsilon,
    zcdp_rho,
)
from edpsgd.ledger.events import Event
from edpsgd.ledger.guarantee import Bound, report
from edpsgd.schedules import Decay

DECAYS = [None, LinearDecay(0.2), ExponentialDecay(0.1)]


def bounds_of(z0: float, epochs: int, decay: Decay | None, also: list[float], delta: float = 1e-5, **batching):
    """What the ledger of such a training would report."""
    batching = {"steps": 10, "batching": "shuffled", **batching}
    events = [Event("layer_norms", None, z, 1) for z in also]
    events += [
        Event("gradients", t, z0 * factor, **batching)
        for t, factor in enumerate(accounting.decay_factors(epochs, decay))
    ]
    return report(events, delta).bounds


def method(bounds: tuple[Bound, ...], name: str) -> float:
    return next(bound.epsilon for bound in bounds if bound.method.startswith(name))


def mu_of(epsilon: float, delta: float) -> float:
    """μ of the Gaussian mechanism, from Balle and Wang's formula for δ."""

    def excess(mu: float) -> float:
        rest = math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        return float(norm.cdf(mu / 2 - epsilon / mu) - rest) - delta

    return float(optimize.brentq(excess, 1e-3, 20.0, xtol=1e-13))


deltas = st.floats(-12.0, -1.0).map(lambda exponent: 10.0**exponent)


def some(examples: int):
    return settings(deadline=None, derandomize=True, max_examples=examples)


SOME_DECAYS = [None, LinearDecay(0.2), ExponentialDecay(0.1), lambda t: 1.0 if t % 2 else 0.8]


def test_exact_is_the_formula() -> None:
    """μ² of the training is what the releases leave: Σ (1 + 0.1·t)²/z0² = μ² − 1/2² − 1/3²."""
    left = mu_of(8.0, 1e-5) ** 2 - 1 / 4 - 1 / 9
    expected = math.sqrt(sum((1 + 0.1 * t) ** 2 for t in range(20)) / left)
    assert calibrate(8.0, 1e-5, 20, LinearDecay(0.1), also=[2.0, 3.0]) == pytest.approx(expected, rel=1e-8)


def test_zcdp_is_the_formula() -> None:
    """ε = ρ + 2·√(ρ·ln(1/δ)) solved for ρ, less 1/(2·2²)."""
    log = math.log(1e5)
    rho = (math.sqrt(log + 8.0) - math.sqrt(log)) ** 2 - 1 / 8
    expected = math.sqrt(sum((1 + 0.1 * t) ** 2 for t in range(20)) / (2 * rho))
    found = calibrate(8.0, 1e-5, 20, LinearDecay(0.1), method="zcdp", also=[2.0])
    assert found == pytest.approx(expected, rel=1e-9)


def test_nothing_further_is_as_before() -> None:
    assert calibrate(8.0, 1e-5, 20, LinearDecay(0.1), also=()) == calibrate(8.0, 1e-5, 20, LinearDecay(0.1))
    assert calibrate(8.0, 1e-5, 20, LinearDecay(0.1), also=iter([])) == pytest.approx(5.45845559335, abs=1e-11)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-1.0, 2.0).map(lambda e: 10.0**e),
    st.sampled_from([1e-3, 1e-5, 1e-9]),
    st.integers(1, 30),
    st.sampled_from(DECAYS),
    st.lists(st.floats(0.01, 0.9), min_size=1, max_size=3),
    st.sampled_from(["exact", "zcdp"]),
)
def test_the_ledger_reports_the_target_and_never_more(target, delta, epochs, decay, shares, kind) -> None:
    """The releases take a share of the target's μ² each, or of what the ones before have left."""
    left = calibrate(target, delta, 1, method=kind) ** -2
    also = []
    for share in shares:
        also.append((left * share) ** -0.5)
        left *= 1 - share
    z0 = calibrate(target, delta, epochs, decay, method=kind, also=also)
    bounds = bounds_of(z0, epochs, decay, also, delta)
    epsilon = method(bounds, "exact Gaussian" if kind == "exact" else "zCDP")
    assert target * (1 - 1e-9) <= epsilon <= target


@pytest.mark.parametrize(
    ("target", "rate", "steps", "epochs", "decay", "also"),
    [
        (2.0, 0.01, 100, 3, DECAYS[0], [3.0]),
        (2.0, 0.01, 100, 3, DECAYS[1], [2.0001]),  # which leaves 0.4 % of ε
        (8.0, 0.002, 500, 2, DECAYS[2], [1.0, 1.5]),
        (0.05, 1e-3, 50, 1, DECAYS[0], [200.0]),
        (2.0, 1.0, 1, 3, DECAYS[1], [5.0]),
    ],
)
def test_with_poisson_sampling(target, rate, steps, epochs, decay, also) -> None:
    z0 = calibrate(target, 1e-5, epochs, decay, rate, steps, also=also)
    epsilon = bounds_of(z0, epochs, decay, also, steps=steps, batching="poisson", sampling_rate=rate)[0].epsilon
    assert target * (1 - 5e-3) <= epsilon <= target
    assert z0 > calibrate(target, 1e-5, epochs, decay, rate, steps)


@pytest.mark.parametrize("sampling", [(), (0.01, 100)])
def test_what_the_releases_leave_nothing_of(sampling) -> None:
    alone = accounting.gaussian_epsilon([1.0], 1e-5)
    message = "target_epsilon must be larger than what the further releases alone cost, 4.37718, got"
    for target in (alone, 2.0):
        with pytest.raises(ValueError, match=message):
            calibrate(target, 1e-5, 5, None, *sampling, also=[1.0])
    with pytest.raises(ValueError, match="alone cost, 5.29853, got 5.0"):
        calibrate(5.0, 1e-5, 5, method="zcdp", also=[1.0])
    with pytest.raises(ValueError, match="alone cost, inf, got"):
        calibrate(2.0, 1e-5, 5, None, *sampling, also=[1e-200])


@pytest.mark.parametrize("z", [0.0, -1.0, math.nan, math.inf, True, "1", None])
def test_bad_releases(z) -> None:
    with pytest.raises(ValueError, match=r"also\[1\] must be a finite number > 0, got"):
        calibrate(8.0, 1e-5, 5, also=[2.0, z])


def test_calibration() -> None:
    decay = LinearDecay(0.1)
    assert calibrate(8.0, 1e-5, 20, decay) == pytest.approx(5.45845559335, abs=1e-11)
    assert calibrate(8.0, 1e-5, 20, decay, method="zcdp") == pytest.approx(6.27800735951, abs=1e-11)


@some(60)
@given(
    st.floats(-3.0, 3.0).map(lambda e: 10.0**e),
    deltas,
    st.integers(1, 60),
    st.sampled_from(SOME_DECAYS),
    st.sampled_from(["exact", "zcdp"]),
)
def test_calibrate_then_account(target, delta, epochs, decay, method) -> None:
    z = calibrate(target, delta, epochs, decay, method=method)
    z_of_epochs = [z * f for f in accounting.decay_factors(epochs, decay)]
    exact = gaussian_epsilon(z_of_epochs, delta)
    epsilon = exact if method == "exact" else zcdp_epsilon(zcdp_rho(z_of_epochs), delta)
    assert target * (1 - 1e-3) <= epsilon <= target


@pytest.mark.parametrize(
    ("target", "rate", "steps", "epochs", "decay"),
    [
        (1.0, 0.01, 100, 3, SOME_DECAYS[0]),
        (3.0, 0.05, 20, 4, SOME_DECAYS[1]),
        (0.3, 0.1, 10, 2, SOME_DECAYS[2]),
        (8.0, 0.002, 500, 3, SOME_DECAYS[3]),
        (2.0, 1.0, 1, 3, SOME_DECAYS[1]),
        (0.05, 1e-3, 50, 1, SOME_DECAYS[0]),
    ],
)
def test_calibrate_then_account_with_sampling(target, rate, steps, epochs, decay) -> None:
    z = calibrate(target, 1e-5, epochs, decay, rate, steps)
    z_of_epochs = [z * f for f in accounting.decay_factors(epochs, decay)]
    epsilon = poisson_epsilon(z_of_epochs, rate, steps, 1e-5)
    assert target * (1 - 1e-2) <= epsilon <= target


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"target_epsilon": v}, "target_epsilon must be a finite") for v in (0.0, -1.0, math.nan, math.inf, True)),
        *(({"epochs": v}, "epochs must be an int >= 1, got") for v in (0, -1, 1.5, True, None, math.nan)),
        *(({"decay": v}, "decay must be None or a callable") for v in (0.5, "linear", True)),
        *(
            ({"decay": lambda t, v=v: v if t == 3 else 1.0}, r"decay\(3\) must be a finite number > 0, got")
            for v in (0.0, -1.0, math.nan, math.inf, True, None, "1")
        ),
        ({"sampling_rate": 0.1}, "sampling_rate and steps_per_epoch belong together"),
        ({"steps_per_epoch": 10}, "sampling_rate and steps_per_epoch belong together"),
        *(
            ({"sampling_rate": 0.1, "steps_per_epoch": v}, "steps_per_epoch must be an int >= [01], got")
            for v in (0, -1, 1.5, True)
        ),
        ({"method": "rdp"}, "method must be 'exact', or 'zcdp' without sampling, got 'rdp'"),
        ({"method": "zcdp", "sampling_rate": 0.1, "steps_per_epoch": 10}, "method must be 'exact'"),
        ({"delta": 0.0}, "delta must be between"),
    ],
)
def test_bad_calibration(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(**{"target_epsilon": 1.0, "delta": 1e-5, "epochs": 5, **settings})


def test_a_calibration_never_settles_for_no_number() -> None:
    with pytest.raises(ValueError, match="cannot be reached"):
        calibration._raise_to_target(1.0, lambda z: math.nan, 1.0)
