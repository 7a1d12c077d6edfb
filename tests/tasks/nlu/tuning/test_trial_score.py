"""Scores of trainings: right answers, on public utterances or with noise."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edpsgd.distributed.collectives import Local
from tasks.nlu import generator
from tasks.nlu.dataset import load
from tasks.nlu.metrics import right_share, semantic_errors
from tasks.nlu.prediction import predict
from tasks.nlu.run_folder import load as load_run
from tasks.nlu.tuning import trial_score
from tasks.nlu.tuning.trial_score import Scored, ScoreRule
from tests.helpers.jobs import here, run, tiny


@pytest.mark.parametrize("text", ["noisy", "noisy:2.5", "exact", "public:a:b.jsonl"])
def test_rules_are_read_as_they_are_written(text) -> None:
    assert ScoreRule.parse(text).text() == text


@pytest.mark.parametrize(
    "text", ["", "public", "public:", "noisy:", "noisy:0", "noisy:-1", "noisy:inf", "noisy:x", "exact:1"]
)
def test_what_is_no_rule_is_refused(text) -> None:
    with pytest.raises(ValueError, match="score must be public:FILE, noisy, noisy:Z with Z > 0, or exact"):
        ScoreRule.parse(text)


def test_scores_are_shares_of_right_answers_and_noise_moves_them(tmp_path) -> None:
    config = tiny(tmp_path / "run", private="off", seed=1, learning_rate=0.02, head_learning_rate=0.05, epochs=8)
    run(config)
    data, team = load(config, None, 0), here("local", Local())
    own = Scored.of_rule(ScoreRule("exact"), data)
    utterances = [data.corpus[row] for row in data.rows.validation.tolist()]
    parts = load_run(tmp_path / "run")
    answers = list(predict(parts, (" ".join(one.words) for one in utterances)))
    expected = 0.0
    for said, answer in zip(utterances, answers, strict=True):
        starts = np.cumsum([0, *(len(word) + 1 for word in said.words)]).tolist()
        slots = [(s["type"], starts.index(s["start"]), starts.index(s["end"] + 1)) for s in answer["slots"]]
        errors = semantic_errors((said.intent, said.slots()), (answer["intent"], slots))
        wrong = errors.deletions + errors.insertions + errors.substitutions
        expected += 1 - min(1.0, wrong / errors.references)
    exact = trial_score.measure(ScoreRule("exact"), own, tmp_path / "run", config, team)
    assert exact == pytest.approx(100 * expected / len(utterances))
    assert 0 < exact < 100

    rule = ScoreRule("noisy", noise=3.0)
    noise = [
        (trial_score.measure(rule, own, tmp_path / "run", config, team) - exact) * len(utterances) / 100
        for _ in range(40)
    ]
    assert 1.5 < np.std(noise) < 5.0

    file = tmp_path / "public.jsonl"
    lines = [
        {"tokens": list(one.words), "tags": list(one.tags), "intent": one.intent}
        for one in generator.utterances(30, seed=5)
    ]
    unknown = {"tokens": ["what"], "tags": ["B-unheard"], "intent": "unheard"}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, unknown]))
    public = Scored.of_rule(ScoreRule("public", file=str(file)), data)
    assert 0 < trial_score.measure(ScoreRule("public", file=str(file)), public, tmp_path / "run", config, team) < 100


def test_one_utterance_moves_the_sum_by_one_at_most() -> None:
    for said in generator.utterances(20, seed=1):
        worst = right_share(said, ("unheard", ["B-unheard"] * len(said.words)))
        assert worst == 0.0
        assert right_share(said, (said.intent, list(said.tags))) == 1.0
