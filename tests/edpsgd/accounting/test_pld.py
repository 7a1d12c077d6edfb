"""Privacy loss distributions: against finer grids, dp-accounting, closed forms, and the exact Gaussian mechanism."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as reference
from scipy import fft, integrate, optimize

from edpsgd import accounting
from edpsgd.accounting import loss_transform, pld
from edpsgd.accounting.pld import Composition, Steps

THREE_DIGITS = 5e-4  # relative
# Found by a random search: few steps of rare examples, where a loss distribution has hardly any middle.
KNOWN_AS_HARD = [
    ([Steps(1.0, 1e-3, 1)], 1e6**-1.1),
    ([Steps(0.687, 0.001153, 1)], 8.97e-6),
    ([Steps(0.505765286309447, 1.9131724810859854e-05, 1)], 1.7316399589310607e-07),
    ([Steps(0.5803805783948293, 6.041837344554713e-05, 1)], 2.4332322973577753e-06),
    ([Steps(0.3193922413947089, 5.456179838986251e-05, 4)], 1.3297445090620529e-08),
    ([Steps(0.3546731367126166, 6.845417166924096e-05, 81)], 0.0004604852465614307),
    ([Steps(0.48509855953154135 / (1 + 0.1 * k), 7.659915017709562e-05, 3) for k in range(5)], 8.127489162482011e-07),
]


def decaying(z: float, q: float, total: int, levels: int) -> list[Steps]:
    return [Steps(z / (1 + 0.1 * k), q, max(1, total // levels)) for k in range(levels)]


def settings() -> Iterator[tuple[list[Steps], float]]:
    """Every q with every z; numbers of steps and levels and δ take turns, so that they meet in all ways."""
    totals = itertools.cycle([1, 30, 1000, 100_000, 3, 200, 10_000])
    levels = itertools.cycle([1, 1, 5, 1, 3])
    deltas = itertools.cycle([1e-5, 1e-8, 1e-3, 1e-6])
    for q, z in itertools.product([1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9], [0.3, 0.5, 0.8, 1.0, 1.6, 3.0, 8.0]):
        yield decaying(z, q, next(totals), next(levels)), next(deltas)
    for q, z in itertools.product([1e-5, 3e-4, 4e-3, 0.03, 0.3], [0.4, 0.7, 1.2, 4.0]):
        yield decaying(z, q, next(totals), next(levels)), next(deltas)


@pytest.mark.parametrize(("steps", "delta"), [*settings(), *KNOWN_AS_HARD])
def test_three_digits_and_never_below_a_finer_grid(steps, delta) -> None:
    fine = Composition(tolerance=pld.TOLERANCE / 16, patience=math.inf).epsilon(steps, delta)
    epsilon = Composition().epsilon(steps, delta)
    print(f"{(epsilon - fine) / fine if fine else epsilon:.2g} above the finer grid")
    assert math.isfinite(fine)
    assert fine <= epsilon <= fine * (1 + THREE_DIGITS)


def density(x: float, z: float) -> float:
    return math.exp(-0.5 * (x / z) ** 2) / (z * math.sqrt(2 * math.pi))


def one_step_delta(epsilon: float, z: float, q: float, removing: bool) -> float:
    """∫ max(0, p − e^ε·p'), by adaptive integration; the sign changes at one known output."""
    ratio = (math.expm1(epsilon if removing else -epsilon) + q) / q
    if ratio <= 0:
        return 0.0
    turn = z * z * math.log(ratio) + 0.5

    def excess(x: float) -> float:
        without, mixed = density(x, z), (1 - q) * density(x, z) + q * density(x - 1, z)
        return mixed - math.exp(epsilon) * without if removing else without - math.exp(epsilon) * mixed

    far = max(1.0, turn) + 40 * z if removing else min(0.0, turn) - 40 * z
    middle = sorted({float(np.clip(v, min(turn, far), max(turn, far))) for v in (turn + z, turn - z, 0.0, 1.0)})
    bounds = sorted({turn, *middle, far})
    parts = [integrate.quad(excess, a, b, epsabs=0, epsrel=1e-10, limit=400)[0] for a, b in itertools.pairwise(bounds)]
    return math.fsum(parts)


def one_step_epsilon(z: float, q: float, delta: float) -> float:
    def solve(removing: bool) -> float:
        if one_step_delta(0.0, z, q, removing) <= delta:
            return 0.0
        return float(
            optimize.brentq(lambda e: one_step_delta(e, z, q, removing) - delta, 0.0, 40.0, xtol=1e-13, rtol=1e-12)
        )

    return max(solve(True), solve(False))


@pytest.mark.parametrize(
    ("z", "q", "delta"),
    [
        *itertools.product([0.5, 1.0, 3.0], [1e-3, 0.05, 0.6], [1e-7, 1e-4]),
        (1.0, 0.99, 1e-5),
        (0.3, 0.2, 1e-3),
        (8.0, 0.9, 1e-8),
        *((s.noise_multiplier, s.sampling_rate, d) for (s, *more), d in KNOWN_AS_HARD if s.number == 1 and not more),
    ],
)
def test_one_step_against_an_integral(z, q, delta) -> None:
    exact = one_step_epsilon(z, q, delta)
    epsilon = Composition().epsilon([Steps(z, q, 1)], delta)
    assert exact * (1 - 1e-9) <= epsilon <= exact * (1 + THREE_DIGITS)


@pytest.mark.parametrize("removing", [True, False])
@pytest.mark.parametrize(("z", "q"), [(1.0, 0.05), (0.5, 0.6), (3.0, 0.3)])
def test_each_direction_of_one_step_against_an_integral(z, q, removing) -> None:
    epsilon = Composition()._one_direction([Steps(z, q, 1)], 1e-5, 1 if removing else -1, 0.0)
    assert one_step_delta(epsilon, z, q, removing) <= 1e-5 * (1 + 1e-9)
    assert one_step_delta(epsilon * (1 - THREE_DIGITS), z, q, removing) >= 1e-5


def bracket(steps: Sequence[Steps], delta: float, interval: float) -> tuple[float, float]:
    """dp-accounting's optimistic and its pessimistic ε."""

    def epsilon(pessimistic: bool) -> float:
        parts = [
            reference.from_gaussian_mechanism(
                s.noise_multiplier,
                pessimistic_estimate=pessimistic,
                value_discretization_interval=interval,
                sampling_prob=s.sampling_rate,
                use_connect_dots=pessimistic,
            ).self_compose(s.number)
            for s in steps
        ]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.compose(part)
        return float(whole.get_epsilon_for_delta(delta))

    return epsilon(False), epsilon(True)


@pytest.mark.parametrize(
    ("steps", "delta", "interval"),
    [
        ([Steps(1.0, 0.01, 1000)], 1e-5, 1e-4),
        (decaying(1.0, 0.01, 500, 5), 1e-5, 3e-4),
        ([Steps(1.0, 1e-3, 10_000)], 1e-5, 4e-5),
        ([Steps(2.0, 0.2, 300)], 1e-6, 1e-4),
        ([Steps(4.0, 0.9, 50)], 1e-8, 1e-4),
        ([Steps(0.7, 0.05, 20)], 1e-5, 1e-4),
        ([Steps(0.5, 1e-3, 3), Steps(0.6, 0.02, 2)], 1e-6, 3e-4),
        ([Steps(0.3546731367126166, 6.845417166924096e-05, 81)], 0.0004604852465614307, 3e-4),
    ],
)
def test_against_dp_accounting(steps, delta, interval) -> None:
    """Its optimistic ε is below the true one, its pessimistic ε above, and at this interval close to it."""
    optimistic, pessimistic = bracket(steps, delta, interval)
    epsilon = Composition().epsilon(steps, delta)
    print(f"{epsilon / pessimistic - 1:.2g} above dp-accounting, whose bounds are {pessimistic - optimistic:.2g} apart")
    assert optimistic <= epsilon <= pessimistic * (1 + THREE_DIGITS)


@pytest.mark.parametrize(
    ("steps", "delta"),
    [
        ([Steps(8.0, 1.0, 1), Steps(1.0, 0.01, 500)], 1e-5),
        ([Steps(1.0, 0.05, 50), Steps(3.0, 1.0, 2), Steps(0.8, 0.05, 50)], 1e-6),
    ],
)
def test_steps_with_everyone_among_sampled_ones(steps, delta) -> None:
    optimistic, pessimistic = bracket(steps, delta, 1e-4)
    epsilon = Composition().epsilon(steps, delta)
    assert optimistic <= epsilon <= pessimistic * (1 + THREE_DIGITS)
    assert epsilon > Composition().epsilon([s for s in steps if s.sampling_rate < 1], delta)


@pytest.mark.parametrize("delta", [1e-3, 1e-8, 1e-15, 1e-30])
@pytest.mark.parametrize(("z", "number"), [(0.5, 1), (1.0, 1), (3.0, 7), (10.0, 1000), (300.0, 100)])
def test_without_sampling_it_is_one_gaussian_mechanism(z, number, delta) -> None:
    """Composition itself knows nothing of this."""
    exact = accounting.gaussian_epsilon([z / math.sqrt(number)], delta)
    epsilon = Composition().epsilon([Steps(z, 1.0, number)], delta)
    assert exact * (1 - 1e-9) <= epsilon <= exact * (1 + THREE_DIGITS)


@pytest.mark.parametrize("delta", [1e-15, 1e-30])
def test_tiny_delta_with_sampling(delta) -> None:
    """Nearly no sampling is nearly the Gaussian mechanism, and more of it is less."""
    exact = accounting.gaussian_epsilon([2.0 / math.sqrt(100)], delta)
    epsilons = [Composition().epsilon([Steps(2.0, q, 100)], delta) for q in (1 - 1e-9, 0.9, 0.5, 0.1)]
    assert exact * (1 - 1e-6) <= epsilons[0] <= exact * (1 + THREE_DIGITS)
    assert epsilons == sorted(epsilons, reverse=True)
    assert epsilons[3] > 0


def count_transforms(monkeypatch) -> Callable[[], int]:
    calls = []
    original = fft.rfft

    def rfft(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(loss_transform.fft, "rfft", rfft)
    return lambda: len(calls)


@pytest.mark.parametrize("q", [1e-3, 0.02])
def test_growing_lists_keep_their_transforms(monkeypatch, q) -> None:
    """From scratch it would be 40·41/2 transforms for each of at least three passes: fewer than half of that."""
    epochs = [Steps(1.0 / (1 + 0.05 * t), q, 100) for t in range(40)]
    transforms = count_transforms(monkeypatch)
    composition = Composition()
    growing = [composition.epsilon(epochs[: t + 1], 1e-5) for t in range(40)]
    incremental = transforms()
    print(f"{incremental} transforms")
    assert growing == sorted(growing)
    for t in (0, 1, 9, 22, 39):
        assert growing[t] == pytest.approx(Composition().epsilon(epochs[: t + 1], 1e-5), rel=1e-9)
    assert incremental < 3 * 40 * 41 / 2 / 2


def test_other_lists_do_not_disturb() -> None:
    """A list that is no continuation, a shorter one, and another δ, with the same object."""
    composition = Composition()
    questions = [
        (decaying(1.0, 0.01, 500, 5), 1e-5),
        (decaying(1.0, 0.01, 500, 5), 1e-7),
        (decaying(1.0, 0.01, 500, 5)[:2], 1e-5),
        (decaying(0.9, 0.01, 500, 5), 1e-5),
        ([*decaying(0.9, 0.01, 500, 5), Steps(0.9, 0.01, 3)], 1e-5),
        (decaying(0.9, 0.01, 500, 5)[::-1], 1e-5),
        ([Steps(1.0, 0.02, 10)], 1e-5),
    ]
    for steps, delta in questions:
        expected = Composition().epsilon(steps, delta)
        assert composition.epsilon(steps, delta) == pytest.approx(expected, rel=1e-9)


def test_trivial_lists() -> None:
    assert Composition().epsilon([], 1e-5) == 0.0
    assert Composition().epsilon([Steps(1.0, 0.1, 0)], 1e-5) == 0.0
    assert Composition().epsilon([Steps(1.0, 0.1, 1), Steps(0.0, 0.1, 1)], 1e-5) == math.inf


def test_rare_examples_cost_less_than_delta() -> None:
    """With q·steps below δ, nobody is seen with more than probability δ."""
    assert Composition().epsilon([Steps(0.5, 1e-7, 10)], 1e-3) == pytest.approx(0.0, abs=1e-4)
