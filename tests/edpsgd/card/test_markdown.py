"""The page of a card: tables, runs, and text that stays text."""

from __future__ import annotations

from edpsgd import card
from edpsgd.ledger import Ledger
from tests.helpers.cards import RUN, ledger_of, section, text_of


def test_schedule_takes_equal_epochs_together_and_leaves_out_the_middle() -> None:
    constant = section(text_of({}, epochs=30), "Noise multipliers that were accounted")
    assert "| 0 to 29 | 30 | 90 | 1 |" in constant
    made = card.make(ledger_of(RUN, epochs=30, tau=0.1), 1e-5)
    table = section(made.markdown(), "Noise multipliers that were accounted").splitlines()
    assert len(made.schedule) == 30
    assert len(table) == 2 + 15
    assert table[2] == "| 0 | 1 | 3 | 1 |"
    assert table[9].startswith("| … |")
    assert table[-1] == "| 29 | 1 | 3 | 0.25641 |"
    assert (made.epochs, made.steps) == (30, 90)
    assert "30 epochs, 90 steps." in made.markdown()


def test_private_scales_have_a_line_in_the_schedule() -> None:
    ledger = Ledger()
    ledger.charge_layer_norms(2.0)
    made = card.make(ledger, 1e-5)
    assert "| layer scales | 1 | 1 | 2 |" in made.markdown()
    assert made.steps == 0


def test_several_runs_and_what_differs_between_them() -> None:
    runs = [RUN, {**RUN, "workers": 8, "clip_norm": 0.5}, {**RUN, "workers": 8, "layer_scaling": {"a": 1.0, "b": 2.0}}]
    made = card.make(ledger_of(*runs), 1e-5)
    assert made.runs == 3
    assert made.settings["workers"] == 8
    assert "id" not in made.settings
    assert made.differences == {
        "workers": [4, 8, 8],
        "clip_norm": [0.75, 0.5, 0.75],
        "layer_scaling": [None, None, {"a": 1.0, "b": 2.0}],
    }
    text = section(made.markdown(), "Runs")
    assert text.startswith("3 runs wrote the ledger")
    assert "`workers`: 4, then 8\n" in text
    assert "`clip_norm`: 0.75, then 0.5, then 0.75\n" in text
    assert "`layer_scaling`: null, then 2 given scales" in text


def test_equal_runs_have_no_differences_and_one_run_no_section() -> None:
    same = section(card.make(ledger_of(RUN, RUN), 1e-5).markdown(), "Runs")
    assert "2 runs" in same
    assert "differ" not in same
    assert "## Runs" not in text_of({})


def test_statements_are_text_in_markdown() -> None:
    made = card.make(Ledger(), 1e-5, not_covered=["a <b> tag"])
    assert "- a &lt;b> tag\n" in made.markdown()
    assert made.not_covered[0] == "a <b> tag"


def test_an_empty_ledger_and_unknown_settings() -> None:
    made = card.make(Ledger(), 1e-5)
    assert made.epsilon == 0
    assert "0 steps." in made.markdown()
    assert "Norm not recorded, kind not recorded" in made.markdown()
    assert "not recorded workers, noise placement not recorded" in made.markdown()
