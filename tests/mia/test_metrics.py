"""Figures of attacks against scikit-learn, closed forms for normal scores, and the coverage of their intervals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom, binomtest, norm
from sklearn.metrics import roc_auc_score

from mia import metrics


def normal_scores(members: int, others: int, gap: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    truth = np.arange(members + others) < members
    return np.random.default_rng(seed).normal(gap * truth), truth


def by_hand(scores: np.ndarray, truth: np.ndarray) -> list[float]:
    """AUC and both true positive rates with scikit-learn, going through all thresholds."""
    calls = [scores >= t for t in [*scores, np.inf]]
    rates = [(call[truth].mean(), call[~truth].mean()) for call in calls]
    at = [max(tpr for tpr, fpr in rates if fpr <= limit) for limit in (0.01, 0.001)]
    return [float(roc_auc_score(truth, scores)), *map(float, at)]


def estimates(report: metrics.Report) -> list[metrics.Estimate]:
    return [report.auc, report.balanced_accuracy, report.tpr_at_1_percent, report.tpr_at_1_permille]


def values(report: metrics.Report) -> list[float]:
    """AUC and both true positive rates."""
    return [report.auc.value, report.tpr_at_1_percent.value, report.tpr_at_1_permille.value]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=4, max_size=25))
@settings(max_examples=40, deadline=None)
def test_the_figures_are_those_of_scikit_learn(pairs) -> None:
    """With many ties."""
    scores, truth = np.array([s for s, _ in pairs], float), np.array([m for _, m in pairs])
    truth[:4] = [True, False, True, False]
    report = metrics.evaluate(scores, truth)
    assert values(report) == pytest.approx(by_hand(scores, truth), abs=1e-12)
    for threshold, fpr, tpr in zip(report.thresholds, report.fpr, report.tpr, strict=True):
        call = scores >= threshold
        assert (fpr, tpr) == pytest.approx((call[~truth].mean(), call[truth].mean()))
    for estimate in estimates(report):
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_a_case_worked_out() -> None:
    """Members 4, 3, 1 and others 3, 2, 0: pairs won 3 + 2.5 + 1 of 9."""
    report = metrics.evaluate([4, 3, 1, 3, 2, 0], [True] * 3 + [False] * 3)
    assert values(report) == pytest.approx([6.5 / 9, 1 / 3, 1 / 3])
    assert report.thresholds.tolist() == [math.inf, 4, 3, 2, 1, 0]
    assert report.tpr == pytest.approx(np.array([0, 1, 2, 2, 3, 3]) / 3)
    assert report.fpr == pytest.approx(np.array([0, 0, 1, 2, 2, 3]) / 3)
    assert (report.members, report.non_members, report.resolution) == (3, 3, 1 / 3)


def test_normal_scores_in_closed_form() -> None:
    """AUC Φ(d/√2), best balanced accuracy Φ(d/2), TPR at FPR x Φ(d + Φ⁻¹(x)), all in the 99.9 % intervals."""
    gap = 1.5
    report = metrics.evaluate(*normal_scores(10000, 10000, gap), confidence=0.999)
    truth = [norm.cdf(gap / math.sqrt(2)), norm.cdf(gap / 2), *norm.cdf(gap + norm.ppf([0.01, 0.001]))]
    for estimate, value in zip(estimates(report), truth, strict=True):
        assert estimate.low < value < estimate.high
    widths = [e.high - e.low for e in estimates(report)]
    assert max(widths[:2]) < 0.035
    assert max(widths[2:]) < 0.2


@pytest.mark.parametrize(
    ("others", "allowed"), [(50, (0, 0)), (99, (0, 0)), (100, (1, 0)), (999, (9, 0)), (1000, (10, 1))]
)
def test_as_many_false_positives_as_the_rate_allows(others, allowed) -> None:
    """Others and members take turns from the top: with k others let through, k + 1 members are found."""
    scores = np.concatenate([-2.0 * np.arange(others), 1 - 2.0 * np.arange(others)])
    report = metrics.evaluate(scores, np.arange(2 * others) >= others)
    assert values(report)[1:] == [(k + 1) / others for k in allowed]
    assert report.resolution == 1 / others


# ------------------------------------------------------------------- the intervals


def normal_law(gap: float):
    def draw(generator, members: int, others: int):
        return generator.normal(gap, 1, members), generator.normal(0, 1, others)

    at = norm.cdf(gap + norm.ppf([0.01, 0.001]))
    return draw, norm.cdf(gap / math.sqrt(2)), lambda t: (norm.sf(t - gap), norm.sf(t)), at


def few_members_stand_out(generator, members: int, others: int):
    """One member in ten has a score that no other has."""
    return generator.normal(size=members) + 100 * (generator.random(members) < 0.1), generator.normal(size=others)


def two_scores(generator, members: int, others: int):
    """0 or 1; the 1 comes with probabilities 0.3 and 0.2, so that it is never allowed at 1 %."""
    return 1.0 * (generator.random(members) < 0.3), 1.0 * (generator.random(others) < 0.2)


def none_in_between(generator, members: int, others: int):
    """Members are above all others or below: the AUC with the largest variance that there is."""
    return np.sign(generator.random(members) - 0.1), 1e-3 * generator.normal(size=others)


LAWS = {
    "no leak": normal_law(0.0),
    "some leak": normal_law(1.0),
    "much leak": normal_law(3.0),
    "few stand out": (
        few_members_stand_out,
        0.1 + 0.9 / 2,
        lambda t: (0.1 * norm.sf(t - 100) + 0.9 * norm.sf(t), norm.sf(t)),
        np.array([0.1 + 0.9 * 0.01, 0.1 + 0.9 * 0.001]),
    ),
    "two scores": (
        two_scores,
        0.3 * 0.8 + 0.5 * (0.3 * 0.2 + 0.7 * 0.8),
        lambda t: (0.3, 0.2) if 0 < t <= 1 else (1.0 * (t <= 0), 1.0 * (t <= 0)),
        np.zeros(2),
    ),
    "none in between": (
        none_in_between,
        0.9,
        lambda t: (0.9 if -1 < t <= 1 else 1.0 * (t <= -1), norm.sf(t / 1e-3)),
        np.array([0.9, 0.9]),
    ),
}


def misses(law: str, members: int, others: int, rounds: int, confidence: float = 0.95) -> np.ndarray:
    """How often each of the four intervals leaves out what is true in the population."""
    draw, area, rates, at = LAWS[law]
    generator, missed = np.random.default_rng([members, others, len(law)]), np.zeros(4, int)
    truth = np.arange(members + others) < members
    for seed in range(rounds):
        scores = np.concatenate(draw(generator, members, others))
        report = metrics.evaluate(scores, truth, confidence, seed=seed)
        tpr, fpr = rates(chosen_threshold(scores, truth, seed))
        true = [area, (1 + tpr - fpr) / 2, *at]
        missed += [not e.low - 1e-12 <= t <= e.high + 1e-12 for e, t in zip(estimates(report), true, strict=True)]
    return missed


def chosen_threshold(scores: np.ndarray, truth: np.ndarray, seed: int) -> float:
    half = metrics._half(truth, seed)
    own, kinds = scores[half], truth[half]
    candidates = [math.inf, *np.unique(own)[::-1]]
    gains = [(own[kinds] >= t).mean() - (own[~kinds] >= t).mean() for t in candidates]
    best = gains.index(max(gains))
    is_between = 0 < best < len(candidates) - 1
    return (candidates[best] + candidates[best + 1]) / 2 if is_between else candidates[best]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("sizes", [(12, 15), (80, 600)])
def test_intervals_cover_the_truth_as_often_as_they_say(law, sizes) -> None:
    """At most as many misses as 5 % of the rounds make in all but one test of 10,000."""
    rounds = 150
    assert max(misses(law, *sizes, rounds)) <= binom.ppf(1 - 1e-4, rounds, 0.05)


@pytest.mark.parametrize("sizes", [(3, 4), (10, 12), (60, 9)])
def test_the_ends_of_a_mean_of_two_rates_fail_as_seldom_as_they_say(sizes) -> None:
    """Exactly, with all outcomes of two binomials: how often a certified balanced accuracy is not in its interval."""
    members, others = sizes
    ends = np.empty((members + 1, others + 1, 2))
    for found in range(members + 1):
        for right in range(others + 1):
            ends[found, right] = interval_of_rates(found, members, right, others)
    for p in np.linspace(0, 1, 21):
        for q in np.linspace(0, 1, 21):
            chance = np.outer(binom.pmf(np.arange(members + 1), members, p), binom.pmf(range(others + 1), others, q))
            true = (p + q) / 2
            is_missed = (ends[..., 0] > true + 1e-12) | (ends[..., 1] < true - 1e-12)
            assert chance[is_missed].sum() <= 0.05


def interval_of_rates(found: int, members: int, right: int, others: int) -> tuple[float, float]:
    """What evaluate says if the judging halves have so many true positives and true negatives."""
    choosing = [1.0] * members, [-1.0] * others  # threshold 1
    judging = [1.0] * found + [-1.0] * (members - found), [-1.0] * right + [1.0] * (others - right)
    truth = np.repeat([True, False], [2 * members, 2 * others])
    half = metrics._half(truth, 0)
    scores = np.empty(len(truth))
    for kind, first, second in ((truth, choosing[0], judging[0]), (~truth, choosing[1], judging[1])):
        scores[kind & half], scores[kind & ~half] = first, second
    return metrics.evaluate(scores, truth).balanced_accuracy[1:]


def test_no_leak_is_called_a_leak_seldom() -> None:
    """The lower end of the balanced accuracy is above 1/2 in 2.5 % of blind attacks at most."""
    rounds, above, truth = 300, 0, np.arange(400) < 200
    for seed in range(rounds):
        scores = np.random.default_rng(seed).normal(size=400)
        above += metrics.evaluate(scores, truth, seed=seed).balanced_accuracy.low > 0.5
    assert above <= binom.ppf(1 - 1e-4, rounds, 0.025)


@pytest.mark.parametrize(("share", "trials"), [(0.0, 10), (0.3, 10), (1.0, 7), (0.25, 400)])
def test_a_proportion_against_scipy(share, trials) -> None:
    exact = binomtest(round(share * trials), trials).proportion_ci(0.95, method="exact")
    assert metrics.proportion_interval(share, trials, 0.025) == pytest.approx((exact.low, exact.high), abs=1e-9)


@pytest.mark.parametrize(("others", "is_certain"), [(436, False), (437, True)])
def test_how_many_others_certify_a_rate(others, is_certain) -> None:
    """None of n non-members above a threshold: below 1 % for sure only if 0.99^n is at most a quarter of 5 %."""
    assert (0.99**others <= 0.0125) is is_certain
    scores, truth = np.arange(others + 50.0), np.arange(others + 50) >= others
    found = metrics.evaluate(scores, truth).tpr_at_1_percent
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(beta.ppf(0.0125, 50, 1) if is_certain else 0.0)


def test_the_seed_decides_the_halves() -> None:
    case = normal_scores(40, 60, 1.0)
    first = metrics.evaluate(*case, seed=5)
    assert metrics.evaluate(*case, seed=5) == first
    others = {metrics.evaluate(*case, seed=seed).balanced_accuracy for seed in range(6, 12)}
    assert others != {first.balanced_accuracy}
    assert metrics.evaluate(*case, seed=6).auc == first.auc


def test_a_perfect_attack_is_no_certainty() -> None:
    """Two pairs in the right order: the AUC may be as low as √0.025."""
    perfect = metrics.evaluate([5, 4, 1, 0], [True, True, False, False])
    assert perfect.auc == pytest.approx((1, math.sqrt(0.025), 1))
    assert [e.value for e in estimates(perfect)] == [1] * 4
    assert [e.low for e in estimates(perfect)[2:]] == [0, 0]


def test_an_attack_without_any_information() -> None:
    blind = metrics.evaluate(np.zeros(10), np.arange(10) < 4)
    assert [e.value for e in estimates(blind)] == [0.5, 0.5, 0, 0]
    assert all(e.low < 0.5 < e.high for e in estimates(blind))


# ------------------------------------------------------------------- output and bad input


def test_json() -> None:
    report = metrics.evaluate(*normal_scores(30, 50, 1.0), confidence=0.9)
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert plain["auc"] == {"value": report.auc.value, "low": report.auc.low, "high": report.auc.high}
    assert {name: plain[name] for name in ("members", "non_members", "confidence", "fpr_resolution")} == {
        "members": 30, "non_members": 50, "confidence": 0.9, "fpr_resolution": 0.02
    }  # fmt: skip
    assert [plain[n]["value"] for n in ("auc", "tpr_at_1_percent", "tpr_at_1_permille")] == values(report)
    assert "fpr" not in plain
    curve = json.loads(json.dumps(report.to_json(curve=True), allow_nan=False))
    assert (curve["fpr"], curve["tpr"]) == (report.fpr.tolist(), report.tpr.tolist())


def test_a_table_of_attacks() -> None:
    scores, truth = normal_scores(30, 200, 1.0)
    reports = {"loss": metrics.evaluate(scores, truth), "LiRA online": metrics.evaluate(scores + truth, truth)}
    head, *rows, intervals, star = metrics.table(reports).splitlines()
    assert " ".join(head.split()) == "attack AUC balanced accuracy TPR at 1 % FPR TPR at 0.1 % FPR members others"
    for row, (name, report) in zip(rows, reports.items(), strict=True):
        assert row.startswith(name)
        assert row.split()[-2:] == ["30", "200"]
        places = [head.index(title) for title in ("AUC", "balanced", "TPR at 1 %", "TPR at 0.1 %")]
        for place, estimate in zip(places, estimates(report), strict=True):
            figures = [f"{x:.4f}" for x in estimate]
            assert row[place:].startswith(f"{figures[0]} ({figures[1]}, {figures[2]})")
        assert row.count("*") == 1  # 200 others show steps of 0.5 %, not of 0.1 %
    assert intervals == "In brackets: intervals, 95 %."
    assert star.startswith("* ")
    large = {"loss": metrics.evaluate(*normal_scores(10, 1000, 1.0), confidence=0.9)}
    assert "*" not in metrics.table(large)
    assert "0.9" not in metrics.table(large).splitlines()[-1]
    assert metrics.table(large).endswith("90 %.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [True, True]), "members must be two of each kind at least, got 2 among 2 candidates"),
        (([1, 2, 3], [False, True, False]), "members must be two of each kind at least, got 1 among 3 candidates"),
        (([], np.zeros(0, bool)), "got 0 among 0"),
        (([1, math.nan, math.inf], [True, False, True]), "scores must be finite, 2 of 3 are NaN or infinite"),
        (([1, 2, 3], [True, False]), r"must be \(n,\), of one length, got \(3,\) and \(2,\)"),
        (([[1, 2]], [[True, False]]), r"must be \(n,\), of one length, got \(1, 2\)"),
        (([1, 2], [1, 0]), "members must be bool, got int64"),
        (([1, 2, 3, 4], [True, False, True, False], 1.0), "confidence must be in .0, 1., got 1.0"),
    ],
)
def test_bad_input(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.evaluate(*arguments)
