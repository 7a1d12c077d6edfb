"""The demo: a private job, the same without privacy, and what is shown of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import demo
from tasks.nlu.training_job import Outcome

METRICS = {"ser": 12.0, "intent_accuracy": 90.0, "slot_f1": 80.0}


@pytest.fixture
def jobs(monkeypatch) -> list:
    """The settings of the jobs, which are noted instead of run."""
    seen = []

    def noted(config, team) -> Outcome:
        seen.append(config)
        return Outcome(Path(config.output), METRICS, seconds=1.0, epsilon=None, card=Card())

    monkeypatch.setattr(demo, "train", noted)
    return seen


class Card:
    """As much of a privacy card as the demo shows."""

    def markdown(self) -> str:
        return "THE CARD"


def test_both_jobs_differ_in_privacy_alone(jobs, capsys) -> None:
    demo.main()
    private, plain = (config.given() for config in jobs)
    differing = {name for name, value in private.items() if plain[name] != value}
    assert differing == {"private", "epsilon", "output"}
    assert (private["private"], plain["private"], plain["epsilon"]) == ("example", "off", None)
    said = capsys.readouterr().out
    assert "THE CARD" in said
    assert f"tasks.predict --run {private['output']}" in said
