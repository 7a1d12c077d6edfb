"""Figures of attacks against scikit-learn, closed forms for normal scores, and a bootstrap written out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm
from sklearn.metrics import balanced_accuracy_score, roc_auc_score, roc_curve

from mia import metrics


def normal_scores(members: int, others: int, gap: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    truth = np.arange(members + others) < members
    return np.random.default_rng(seed).normal(gap * truth), truth


def by_hand(scores: np.ndarray, truth: np.ndarray) -> list[float]:
    """The four figures with scikit-learn, going through all thresholds."""
    calls = [scores >= t for t in [*scores, np.inf]]
    rates = [(call[truth].mean(), call[~truth].mean()) for call in calls]
    balanced = max(balanced_accuracy_score(truth, call) for call in calls)
    at = [max(tpr for tpr, fpr in rates if fpr <= limit) for limit in (0.01, 0.001)]
    return [float(roc_auc_score(truth, scores)), float(balanced), *map(float, at)]


def estimates(report: metrics.Report) -> list[metrics.Estimate]:
    return [report.auc, report.balanced_accuracy, report.tpr_at_1_percent, report.tpr_at_1_permille]


def values(report: metrics.Report) -> list[float]:
    return [e.value for e in estimates(report)]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=25))
@settings(max_examples=40, deadline=None)
def test_the_figures_are_those_of_scikit_learn(pairs) -> None:
    """With many ties."""
    scores, truth = np.array([s for s, _ in pairs], float), np.array([m for _, m in pairs])
    truth[:2] = [True, False]
    report = metrics.evaluate(scores, truth, resamples=3)
    assert values(report) == pytest.approx(by_hand(scores, truth), abs=1e-12)
    for threshold, fpr, tpr in zip(report.thresholds, report.fpr, report.tpr, strict=True):
        call = scores >= threshold
        assert (fpr, tpr) == pytest.approx((call[~truth].mean(), call[truth].mean()))


def test_a_case_worked_out() -> None:
    """Members 4, 3, 1 and others 3, 2, 0: pairs won 3 + 2.5 + 1 of 9."""
    report = metrics.evaluate([4, 3, 1, 3, 2, 0], [True] * 3 + [False] * 3)
    assert values(report) == pytest.approx([6.5 / 9, 2 / 3, 1 / 3, 1 / 3])
    assert report.thresholds.tolist() == [math.inf, 4, 3, 2, 1, 0]
    assert report.tpr == pytest.approx(np.array([0, 1, 2, 2, 3, 3]) / 3)
    assert report.fpr == pytest.approx(np.array([0, 0, 1, 2, 2, 3]) / 3)
    assert (report.members, report.non_members, report.resolution) == (3, 3, 1 / 3)


def test_normal_scores_in_closed_form() -> None:
    """AUC Φ(d/√2), best balanced accuracy Φ(d/2), TPR at FPR x Φ(d + Φ⁻¹(x)), all in the 99.9 % intervals."""
    gap = 1.5
    report = metrics.evaluate(*normal_scores(6000, 6000, gap), confidence=0.999, resamples=400)
    truth = [norm.cdf(gap / math.sqrt(2)), norm.cdf(gap / 2), *norm.cdf(gap + norm.ppf([0.01, 0.001]))]
    for estimate, value in zip(estimates(report), truth, strict=True):
        assert estimate.low < value < estimate.high
    widths = [e.high - e.low for e in estimates(report)]
    assert max(widths[:2]) < 0.035
    assert max(widths[2:]) < 0.15


@pytest.mark.parametrize(
    ("others", "allowed"), [(50, (0, 0)), (99, (0, 0)), (100, (1, 0)), (999, (9, 0)), (1000, (10, 1))]
)
def test_as_many_false_positives_as_the_rate_allows(others, allowed) -> None:
    """Others and members take turns from the top: with k others let through, k + 1 members are found."""
    scores = np.concatenate([-2.0 * np.arange(others), 1 - 2.0 * np.arange(others)])
    report = metrics.evaluate(scores, np.arange(2 * others) >= others, resamples=2)
    assert values(report)[2:] == [(k + 1) / others for k in allowed]
    assert report.resolution == 1 / others


# ------------------------------------------------------------------- the bootstrap


def test_the_bootstrap_is_the_one_written_out() -> None:
    """Ends of 80 % intervals, from other random numbers: they agree up to their sampling error."""
    scores, truth = normal_scores(120, 200, 1.0, seed=3)
    scores = scores.round(1)  # ties
    fpr, tpr, thresholds = roc_curve(truth, scores, drop_intermediate=False)
    best, generator, drawn = thresholds[np.argmax(tpr - fpr)], np.random.default_rng(7), []
    for _ in range(200):
        rows = np.concatenate([generator.choice(np.flatnonzero(kind), kind.sum()) for kind in (truth, ~truth)])
        resampled, kinds = scores[rows], truth[rows]
        fpr, tpr, _ = roc_curve(kinds, resampled, drop_intermediate=False)
        at = [tpr[fpr <= limit].max() for limit in (0.01, 0.001)]
        drawn.append([roc_auc_score(kinds, resampled), balanced_accuracy_score(kinds, resampled >= best), *at])
    report = metrics.evaluate(scores, truth, resamples=2000, confidence=0.8)
    wanted, errors = np.quantile(drawn, [0.1, 0.9], axis=0).T, 4 * 1.7 * np.std(drawn, axis=0) / math.sqrt(200)
    for estimate, ends, error in zip(estimates(report), wanted, errors, strict=True):
        assert (estimate.low, estimate.high) == pytest.approx(ends, abs=error)


@pytest.mark.parametrize("confidence", [0.6, 0.95])
def test_intervals_cover_the_truth_as_often_as_they_say(confidence) -> None:
    gap, rounds = 1.0, 200
    truth, hits = norm.cdf(gap / math.sqrt(2)), 0
    for seed in range(rounds):
        report = metrics.evaluate(*normal_scores(100, 150, gap, seed), resamples=200, confidence=confidence, seed=seed)
        hits += report.auc.low <= truth <= report.auc.high
    low, high = binom.ppf([0.001, 0.999], rounds, confidence - 0.01)  # a percentile interval is a little short
    assert low <= hits <= high


def test_the_seed_decides_and_the_size_of_blocks_does_not(monkeypatch) -> None:
    case = normal_scores(40, 60, 1.0)
    first = metrics.evaluate(*case, resamples=100, seed=5)
    assert metrics.evaluate(*case, resamples=100, seed=6) != first
    for cells in (1, 700, 10**9):
        monkeypatch.setattr(metrics, "CELLS", cells)
        assert metrics.evaluate(*case, resamples=100, seed=5) == first


def test_a_perfect_attack_and_one_without_any_information() -> None:
    perfect = metrics.evaluate([5, 4, 1, 0], [True, True, False, False])
    assert estimates(perfect) == [(1, 1, 1)] * 4
    blind = metrics.evaluate(np.zeros(10), np.arange(10) < 4)
    assert estimates(blind) == [(0.5, 0.5, 0.5)] * 2 + [(0, 0, 0)] * 2


# ------------------------------------------------------------------- output and bad input


def test_json() -> None:
    report = metrics.evaluate(*normal_scores(30, 50, 1.0), resamples=50, confidence=0.9)
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert plain["auc"] == {"value": report.auc.value, "low": report.auc.low, "high": report.auc.high}
    assert {name: plain[name] for name in ("members", "non_members", "confidence", "resamples", "fpr_resolution")} == {
        "members": 30, "non_members": 50, "confidence": 0.9, "resamples": 50, "fpr_resolution": 0.02
    }  # fmt: skip
    assert [plain[n]["value"] for n in ("balanced_accuracy", "tpr_at_1_percent", "tpr_at_1_permille")] == values(
        report
    )[1:]
    assert "fpr" not in plain
    curve = json.loads(json.dumps(report.to_json(curve=True), allow_nan=False))
    assert (curve["fpr"], curve["tpr"]) == (report.fpr.tolist(), report.tpr.tolist())


def test_a_table_of_attacks() -> None:
    scores, truth = normal_scores(30, 200, 1.0)
    reports = {"loss": metrics.evaluate(scores, truth, 50), "LiRA online": metrics.evaluate(scores + truth, truth, 50)}
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
    assert intervals == "In brackets: bootstrap intervals, 95 %."
    assert star.startswith("* ")
    large = {"loss": metrics.evaluate(*normal_scores(10, 1000, 1.0), resamples=2, confidence=0.9)}
    assert "*" not in metrics.table(large)
    assert "0.9" not in metrics.table(large).splitlines()[-1]
    assert metrics.table(large).endswith("90 %.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [True, True]), "members must have both kinds, got 2 members among 2 candidates"),
        (([1, 2], [False, False]), "members must have both kinds, got 0 members among 2 candidates"),
        (([], np.zeros(0, bool)), "got 0 members among 0"),
        (([1, math.nan, math.inf], [True, False, True]), "scores must be finite, 2 of 3 are NaN or infinite"),
        (([1, 2, 3], [True, False]), r"must be \(n,\), of one length, got \(3,\) and \(2,\)"),
        (([[1, 2]], [[True, False]]), r"must be \(n,\), of one length, got \(1, 2\)"),
        (([1, 2], [1, 0]), "members must be bool, got int64"),
        (([1, 2], [True, False], 0), "resamples must be >= 1 and confidence in .0, 1., got 0 and 0.95"),
        (([1, 2], [True, False], 10, 1.0), "got 10 and 1.0"),
    ],
)
def test_bad_input(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.evaluate(*arguments)
