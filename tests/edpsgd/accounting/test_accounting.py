"""From events to ε and back: reference values, the tables of the papers, laws that must hold, and bad input."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edpsgd import ExponentialDecay, LinearDecay, accounting
from edpsgd.accounting import (
    calibrate,
    gaussian_epsilon,
    moments_epsilon,
    pld,
    poisson_epsilon,
    rdp_epsilon,
    zcdp_epsilon,
    zcdp_rho,
)
from edpsgd.ledger import guarantee
from edpsgd.ledger.events import Event

noises = st.floats(0.05, 50.0)
deltas = st.floats(-12.0, -1.0).map(lambda exponent: 10.0**exponent)


def some(examples: int):
    return settings(deadline=None, derandomize=True, max_examples=examples)


def multipliers(z0: float, decay, epochs: int) -> list[float]:
    return [z0 * decay(t) for t in range(epochs)]


# -------------------------------------------------------------------- reference values: privacy.md sections 3 and 9


def test_linear_decay() -> None:
    z = multipliers(1.0, LinearDecay(0.1), 20)
    assert zcdp_rho(z) == pytest.approx(41.35, rel=1e-14)
    assert zcdp_epsilon(zcdp_rho(z), 5e-4) == pytest.approx(76.806864875624, abs=5e-13)
    assert gaussian_epsilon(z, 5e-4) == pytest.approx(70.422111705724, abs=5e-13)


def test_one_step() -> None:
    half_a_digit = 6e-15  # and one rounding error
    assert zcdp_epsilon(zcdp_rho([1.0]), 1e-5) == pytest.approx(5.29852591218808, abs=half_a_digit)
    assert gaussian_epsilon([1.0], 1e-5) == pytest.approx(4.37717809568122, abs=half_a_digit)


def test_hardly_any_noise() -> None:
    z = multipliers(1e-6, ExponentialDecay(0.5), 30)
    assert zcdp_rho(z) == pytest.approx(3.10963964249889e24, rel=2e-15)
    assert gaussian_epsilon(z, 5e-4) == pytest.approx(3.1096396425071e24, rel=2e-14)


def test_calibration() -> None:
    decay = LinearDecay(0.1)
    assert calibrate(8.0, 1e-5, 20, decay) == pytest.approx(5.45845559335, abs=1e-11)
    assert calibrate(8.0, 1e-5, 20, decay, method="zcdp") == pytest.approx(6.27800735951, abs=1e-11)


def test_poisson_sampling() -> None:
    epsilon = poisson_epsilon(multipliers(1.0, LinearDecay(0.1), 5), 0.01, 100, 1e-5)
    assert 2.591377 <= epsilon <= 2.591377 * (1 + 1e-4)


def test_the_noise_as_printed_in_the_paper() -> None:
    """Section 3: eight workers, z = 1."""
    given_scales = np.array([0.378, 0.756, 1.512])
    scales = given_scales / np.sqrt(np.mean(given_scales**2))
    z = 1.0 / (2 * math.sqrt(8) * scales.max())
    assert z == pytest.approx(0.11692679, abs=5e-9)
    assert gaussian_epsilon([z], 1e-5) == pytest.approx(72.2365, abs=5e-5)


# -------------------------------------------------------------------- McMahan et al. 2018

TABLE_1 = [  # users, sample, z, ε after 1, 10, … 10⁶ rounds
    (1e5, 1e2, 1.0, ["0.97", "0.98", "1.00", "1.07", "1.18", "2.21", "7.50"]),
    (1e6, 1e1, 1.0, ["0.68", "0.69", "0.69", "0.69", "0.69", "0.72", "0.73"]),
    (1e6, 1e3, 1.0, ["1.17", "1.17", "1.20", "1.28", "1.39", "2.44", "8.13"]),
    (1e6, 1e4, 1.0, ["1.73", "1.92", "2.08", "3.06", "8.49", "32.38", "187.01"]),
    (1e6, 1e3, 3.0, ["0.47", "0.47", "0.48", "0.48", "0.49", "0.67", "1.95"]),
    (1e9, 1e3, 1.0, ["0.84", "0.84", "0.84", "0.85", "0.88", "0.88", "0.88"]),
]
TABLE_2 = [  # users, sample, ε after 5000 rounds with z = 1 at δ = 1e-9
    (763430, 5000, "4.634"),
    (763430, 1667, "2.314"),
    (763430, 1250, "2.038"),
    (1e8, 5000, "1.152"),
    (1e8, 1667, "0.991"),
    (1e8, 1250, "0.987"),
]


@pytest.mark.parametrize(("users", "sample", "z", "printed"), TABLE_1)
def test_table_1(users, sample, z, printed) -> None:
    delta, rate = users**-1.1, sample / users
    for exponent, figure in enumerate(printed):
        epsilon = moments_epsilon(z, rate, 10**exponent, delta)
        assert f"{epsilon:.2f}" == figure
        assert poisson_epsilon([z], rate, 10**exponent, delta) < epsilon


@pytest.mark.parametrize(("users", "sample", "printed"), TABLE_2)
def test_table_2(users, sample, printed) -> None:
    epsilon = moments_epsilon(1.0, sample / users, 5000, 1e-9)
    assert f"{epsilon:.3f}" == printed
    assert poisson_epsilon([1.0], sample / users, 5000, 1e-9) < epsilon


# -------------------------------------------------------------------- the Gaussian mechanism, 60 digits


def gaussian_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle and Wang 2018)."""
    epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
    return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-5, 1e-10, 1e-30, 1e-200])
@pytest.mark.parametrize("mu", [1e-12, 1e-8, 1e-4, 1e-2, 0.1, 1.0, 4.0, 30.0, 1e3, 1e5])
def test_gaussian_epsilon_to_the_last_digits(mu, delta) -> None:
    """δ at the ε that was found, moved by a relative 1e-11 or by 1e-15, encloses the given one."""
    epsilon = gaussian_epsilon([1 / mu], delta)
    mu = math.sqrt((1 / mu) ** -2)  # as given, after rounding
    slack = max(1e-11 * epsilon, 1e-15)
    with mpmath.workdps(60):
        assert gaussian_delta(epsilon + slack, mu) < delta
        assert epsilon == 0.0 or gaussian_delta(epsilon - slack, mu) > delta


# -------------------------------------------------------------------- laws


@some(100)
@given(st.lists(noises, min_size=1, max_size=30), deltas)
def test_exact_is_below_zcdp(z, delta) -> None:
    assert gaussian_epsilon(z, delta) <= zcdp_epsilon(zcdp_rho(z), delta)


@some(100)
@given(st.lists(noises, min_size=1, max_size=30), deltas, noises, st.floats(1.01, 3.0))
def test_gaussian_is_monotone(z, delta, more, factor) -> None:
    """Strictly, unless it is 0."""
    epsilon = gaussian_epsilon(z, delta)
    for larger in (
        gaussian_epsilon([*z, more], delta),
        gaussian_epsilon([v / factor for v in z], delta),
        gaussian_epsilon(z, delta / factor),
    ):
        assert larger > epsilon or larger == epsilon == 0


@some(12)
@given(
    st.floats(0.5, 5.0),
    st.floats(-4.0, -0.1).map(lambda e: 10.0**e),
    st.integers(1, 300),
    st.integers(1, 3),
    st.floats(-8.0, -3.0).map(lambda e: 10.0**e),
    st.floats(1.05, 2.0),
)
def test_poisson_is_monotone(z, rate, steps, epochs, delta, factor) -> None:
    """By more than the accuracy of the fourth digit, unless it is 0."""
    epsilon = poisson_epsilon([z] * epochs, rate, steps, delta)
    assert math.isfinite(epsilon)
    for larger in (
        poisson_epsilon([z] * (epochs + 1), rate, steps, delta),
        poisson_epsilon([z / factor] * epochs, rate, steps, delta),
        poisson_epsilon([z] * epochs, rate, steps, delta / factor),
        poisson_epsilon([z] * epochs, min(1.0, rate * factor), steps, delta) * (1 + 5e-4),
    ):
        assert larger > epsilon or larger == epsilon == 0
    assert epsilon <= gaussian_epsilon([z / math.sqrt(epochs * steps)], delta) * (1 + 5e-4)


@some(8)
@given(st.floats(0.7, 4.0), st.floats(-3.0, -0.5).map(lambda e: 10.0**e), st.integers(1, 500))
def test_poisson_is_below_rdp(z, rate, steps) -> None:
    assert poisson_epsilon([z], rate, steps, 1e-5) <= rdp_epsilon([pld.Steps(z, rate, steps)], 1e-5)


DECAYS = [None, LinearDecay(0.2), ExponentialDecay(0.1), lambda t: 1.0 if t % 2 else 0.8]


@some(60)
@given(
    st.floats(-3.0, 3.0).map(lambda e: 10.0**e),
    deltas,
    st.integers(1, 60),
    st.sampled_from(DECAYS),
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
        (1.0, 0.01, 100, 3, DECAYS[0]),
        (3.0, 0.05, 20, 4, DECAYS[1]),
        (0.3, 0.1, 10, 2, DECAYS[2]),
        (8.0, 0.002, 500, 3, DECAYS[3]),
        (2.0, 1.0, 1, 3, DECAYS[1]),
        (0.05, 1e-3, 50, 1, DECAYS[0]),
    ],
)
def test_calibrate_then_account_with_sampling(target, rate, steps, epochs, decay) -> None:
    z = calibrate(target, 1e-5, epochs, decay, rate, steps)
    z_of_epochs = [z * f for f in accounting.decay_factors(epochs, decay)]
    epsilon = poisson_epsilon(z_of_epochs, rate, steps, 1e-5)
    assert target * (1 - 1e-2) <= epsilon <= target


@st.composite
def split_events(draw, poisson: bool):
    """Epochs, and the same steps as a growing ledger shows them: ever more, the last one unfinished."""
    z, rate = draw(st.floats(0.8, 2.0)), draw(st.floats(0.005, 0.2))
    numbers = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))

    def event(epoch: int, steps: int) -> Event:
        batching = {"batching": "poisson", "sampling_rate": rate} if poisson else {"batching": "shuffled"}
        return Event("gradients", epoch, z / (1 + 0.1 * epoch), steps, **batching)

    whole = [event(epoch, number) for epoch, number in enumerate(numbers)]
    looks = [
        [*whole[:epoch], event(epoch, draw(st.integers(0, number)))]
        for epoch, number in enumerate(numbers)
        if draw(st.booleans())
    ]
    return whole, looks


@some(20)
@given(st.one_of(split_events(True), split_events(False)))
def test_looking_in_between_changes_nothing(events) -> None:
    whole, looks = events
    composition = pld.Composition()
    for look in looks:
        guarantee.bound(look, 1e-5, composition=composition)
    epsilon = guarantee.bound(whole, 1e-5, composition=composition).epsilon
    assert epsilon == pytest.approx(guarantee.bound(whole, 1e-5).epsilon, rel=1e-9)


@some(10)
@given(split_events(True), st.randoms(use_true_random=False))
def test_steps_may_be_split_in_any_way(events, random) -> None:
    """One event of n steps costs as much as several that have n together."""
    whole, _ = events
    parts = []
    for e in whole:
        cut = random.randint(0, e.steps)
        parts += [Event(**{**vars(e), "steps": n}) for n in (cut, e.steps - cut)]
    composition = pld.Composition()
    for end in range(1, len(parts) + 1):
        epsilon = guarantee.bound(parts[:end], 1e-5, composition=composition).epsilon
    assert epsilon == pytest.approx(guarantee.bound(whole, 1e-5).epsilon, rel=1e-9)


# -------------------------------------------------------------------- no noise, no epochs, and bad input


def test_no_noise_and_no_epochs() -> None:
    assert zcdp_rho([]) == gaussian_epsilon([], 1e-5) == poisson_epsilon([], 0.1, 10, 1e-5) == 0.0
    assert poisson_epsilon([1.0], 0.1, 0, 1e-5) == 0.0
    assert zcdp_rho([1.0, 0.0]) == gaussian_epsilon([1.0, 0.0], 1e-5) == math.inf
    assert zcdp_epsilon(math.inf, 1e-5) == poisson_epsilon([0.0], 0.1, 10, 1e-5) == math.inf
    assert moments_epsilon(0.0, 0.1, 10, 1e-5) == rdp_epsilon([pld.Steps(0.0, 0.1, 10)], 1e-5) == math.inf


def test_without_sampling_poisson_is_exact() -> None:
    assert poisson_epsilon([2.0], 1.0, 4, 1e-5) == pytest.approx(gaussian_epsilon([1.0], 1e-5), rel=1e-12)


NOISE_FUNCTIONS = {
    "zcdp_rho": lambda z: zcdp_rho([1.0, z]),
    "gaussian_epsilon": lambda z: gaussian_epsilon([1.0, z], 1e-5),
    "poisson_epsilon": lambda z: poisson_epsilon([1.0, z], 0.1, 10, 1e-5),
    "moments_epsilon": lambda z: moments_epsilon(z, 0.1, 10, 1e-5),
}
DELTA_FUNCTIONS = {
    "zcdp_epsilon": lambda delta: zcdp_epsilon(1.0, delta),
    "gaussian_epsilon": lambda delta: gaussian_epsilon([1.0], delta),
    "poisson_epsilon": lambda delta: poisson_epsilon([1.0], 0.1, 10, delta),
    "moments_epsilon": lambda delta: moments_epsilon(1.0, 0.1, 10, delta),
    "calibrate": lambda delta: calibrate(1.0, delta, 10),
}
RATE_FUNCTIONS = {
    "poisson_epsilon": lambda rate: poisson_epsilon([1.0], rate, 10, 1e-5),
    "moments_epsilon": lambda rate: moments_epsilon(1.0, rate, 10, 1e-5),
    "calibrate": lambda rate: calibrate(1.0, 1e-5, 2, None, rate, 10),
}
STEPS_FUNCTIONS = {
    "steps_per_epoch": lambda steps: poisson_epsilon([1.0], 0.1, steps, 1e-5),
    "rounds": lambda steps: moments_epsilon(1.0, 0.1, steps, 1e-5),
}


@pytest.mark.parametrize("name", NOISE_FUNCTIONS)
@pytest.mark.parametrize("z", [-0.1, -math.inf, math.nan, math.inf, True, "1", None])
def test_bad_noise(name, z) -> None:
    with pytest.raises(ValueError, match=r"noise_multiplier.* must be a finite number >= 0, got"):
        NOISE_FUNCTIONS[name](z)


def test_bad_noise_is_named_as_the_argument_is() -> None:
    with pytest.raises(ValueError, match=r"noise_multipliers\[1\] must be"):
        gaussian_epsilon([1.0, -1.0], 1e-5)
    with pytest.raises(ValueError, match=r"noise_multiplier must be"):
        moments_epsilon(-1.0, 0.1, 10, 1e-5)
    with pytest.raises(ValueError, match="noise_multipliers"):
        gaussian_epsilon(True, 1e-5)


@pytest.mark.parametrize("name", DELTA_FUNCTIONS)
@pytest.mark.parametrize("delta", [0, 0.0, 1.0, 1.5, -1e-5, math.nan, math.inf, True, "1e-5", None])
def test_bad_delta(name, delta) -> None:
    with pytest.raises(ValueError, match="delta must be between 0 and 1, both excluded, got"):
        DELTA_FUNCTIONS[name](delta)


@pytest.mark.parametrize("name", RATE_FUNCTIONS)
@pytest.mark.parametrize("rate", [0, 0.0, -0.1, 1.01, math.nan, math.inf, True, "0.1"])
def test_bad_sampling_rate(name, rate) -> None:
    with pytest.raises(ValueError, match="sampling_rate must be > 0 and <= 1, got"):
        RATE_FUNCTIONS[name](rate)


@pytest.mark.parametrize("name", STEPS_FUNCTIONS)
@pytest.mark.parametrize("steps", [-1, 1.5, math.nan, True, "10", None])
def test_bad_numbers_of_steps(name, steps) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an int >= 0, got"):
        STEPS_FUNCTIONS[name](steps)


@pytest.mark.parametrize("rho", [-1.0, math.nan, True, "1", None])
def test_bad_rho(rho) -> None:
    with pytest.raises(ValueError, match="rho must be a number >= 0, got"):
        zcdp_epsilon(rho, 1e-5)


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


@pytest.mark.parametrize("max_order", [0, -1, 1.5, True])
def test_bad_orders(max_order) -> None:
    with pytest.raises(ValueError, match="max_order must be an int >= 1, got"):
        moments_epsilon(1.0, 0.1, 10, 1e-5, max_order)


def test_kinds_of_numbers_that_are_welcome() -> None:
    expected = gaussian_epsilon([2.0, 2.0], 1e-5)
    for z in ([2, 2], (2.0, 2.0), np.array([2.0, 2.0]), np.float32([2, 2]), (v for v in (2.0, 2)), [np.int64(2)] * 2):
        assert gaussian_epsilon(z, 1e-5) == expected
    for a, b in itertools.product([1.0, 1], [np.int64(10), 10]):
        assert poisson_epsilon([a], np.float64(0.1), b, np.float64(1e-5)) == poisson_epsilon([1.0], 0.1, 10, 1e-5)
