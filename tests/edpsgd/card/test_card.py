"""The privacy card: what it says, and what it leaves out."""

from __future__ import annotations

import json
import os

import pytest

import edpsgd
from edpsgd import card
from edpsgd.ledger import Ledger
from tests.helpers.cards import POISSON, RUN, SHUFFLED, ledger_of, section, text_of
from tests.helpers.common import Bag, private, set_gradients


def test_epsilon_is_the_reference_value_with_all_methods_beside_it() -> None:
    made = card.make(ledger_of({**RUN, "batches": SHUFFLED}, epochs=20, tau=0.1, batching="shuffled"), 5e-4)
    assert made.epsilon == pytest.approx(70.422111705724, rel=1e-9)  # privacy.md section 9
    table = section(made.markdown(), "ε by every method")
    assert "| 70.43 | exact Gaussian |" in table
    assert "| 76.81 | zCDP, as in the paper |" in table
    assert "every example in every step" in table
    assert made.conditions == []
    assert "It holds on condition" not in made.markdown()


def test_epsilon_of_poisson_sampling() -> None:
    ledger = ledger_of(
        {**RUN, "batches": POISSON}, epochs=5, tau=0.1, steps=100, batching="poisson", sampling_rate=0.01
    )
    made = card.make(ledger, 1e-5)
    assert made.epsilon == pytest.approx(2.591377, rel=2e-4)  # privacy.md section 9
    assert [bound["method"][:3] for bound in made.bounds] == ["PLD", "RDP", "exa"]
    assert "added or removed" in section(made.markdown(), "Unit of privacy")
    sampling = section(made.markdown(), "Sampling")
    assert "probability 0.01" in sampling
    assert "1234 examples, 100 steps in an epoch, 1 micro-batches per worker" in sampling


def test_without_set_epoch_every_step_is_a_pass() -> None:
    ledger = Ledger()
    ledger.open_epoch(None)
    for _ in range(4):
        ledger.charge(2.0)
    ledger.open_epoch(0)
    ledger.charge(2.0)
    made = card.make(ledger, 1e-5)
    assert [(row["first_epoch"], row["passes"], row["steps"]) for row in made.schedule] == [(None, 4, 4), (0, 1, 1)]
    ledger.events.pop()
    assert "set_epoch was not called" in section(card.make(ledger, 1e-5).markdown(), "Sampling")
    assert "| not given | 4 | 4 | 2 |" in card.make(ledger, 1e-5).markdown()


def test_raw_scales_of_an_earlier_run_stay_uncovered() -> None:
    ledger = Ledger()
    ledger.begin_run(RUN)
    ledger.charge_layer_norms(0.0)
    made = card.make(ledger, 1e-5)
    assert any("raw norms" in item for item in made.not_covered)
    assert any("raw first-step norms" in item for item in made.conditions)


def test_an_event_without_steps_is_not_shown() -> None:
    ledger = ledger_of(RUN)
    ledger.open_epoch(1)
    made = card.make(ledger, 1e-5)
    assert len(made.schedule) == 1
    assert made.epochs == 1


def test_what_is_never_covered_is_always_listed() -> None:
    for changes in ({}, {"batches": SHUFFLED}):
        listed = section(text_of(changes), "Not covered by ε")
        for topic in ("early stopping", "hyper-parameters", "vocabulary and label sets", "clip fraction", "BatchNorm"):
            assert topic in listed
        assert "seed" not in listed
        assert "metrics" not in listed


@pytest.mark.parametrize(
    ("changes", "batching", "in_list", "in_conditions"),
    [
        ({"seeded": True}, "shuffled", "seed of the noise", "noise comes from a given seed"),
        ({"batches": {**POISSON, "seeded": True}}, "poisson", "seed of the random draws", "batches come from a given"),
        ({"batches": {**SHUFFLED, "seeded": True}}, "shuffled", None, None),
        ({}, "unvouched", None, "no sampler vouches"),
    ],
)
def test_conditions_that_apply_and_no_others(changes, batching, in_list, in_conditions) -> None:
    rate = 0.01 if batching == "poisson" else None
    made = card.make(ledger_of({**RUN, **changes}, batching=batching, sampling_rate=rate), 1e-5)
    assert len(made.not_covered) == 4 + (in_list is not None)
    assert in_list is None or in_list in made.not_covered[0]
    assert len(made.conditions) == (in_conditions is not None)
    if in_conditions is not None:
        assert in_conditions in section(made.markdown(), "It holds on condition that")


def test_what_a_run_writes_down_later_makes_it_no_second_run() -> None:
    ledger = ledger_of(RUN)
    ledger.note_change({"one_pass": True})
    made = card.make(ledger, 1e-5)
    assert (made.runs, made.differences, made.settings["one_pass"]) == (1, {}, True)
    ledger.note_change({"clip_norm": 0.5})
    assert card.make(ledger, 1e-5).differences == {"clip_norm": [0.75, 0.5]}


def test_infinite_epsilon_and_metrics_are_valid_json() -> None:
    metrics = {"SER": 0.25, "loss": float("nan"), "a|b<c": 3}
    made = card.make(ledger_of(RUN, z=0.0), 1e-5, metrics)

    def refuse(token: str) -> None:
        raise AssertionError(token)

    data = json.loads(made.json(), parse_constant=refuse)
    assert data["epsilon"] == "inf"
    assert data["metrics"] == {"SER": 0.25, "loss": "nan", "a|b<c": 3}
    assert "**ε = inf at δ = 1e-05**" in made.markdown()
    assert "| a\\|b&lt;c | 3 |" in made.markdown()
    assert "metrics in this card" in section(made.markdown(), "Not covered by ε")


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"text": "turn on the light"}, "metrics\\['text'\\] must be an int or float, got str"),
        ({"none": None}, "metrics\\['none'\\] must be an int or float, got NoneType"),
        ({"ok": True}, "metrics\\['ok'\\] must be an int or float, got bool"),
        ({"two\nlines": 1.0}, "metrics must have names of 1 to 80 printable characters, got 'two"),
        ({"x" * 81: 1.0}, "metrics must have names of 1 to 80"),
        ({1: 1.0}, "metrics must have names of 1 to 80 printable characters, got 1"),
    ],
)
def test_metrics_are_names_and_numbers(metrics: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        card.make(Ledger(), 1e-5, metrics)


STATEMENTS = ["the word list: read from the training set", "early stopping on validation data after epoch 7"]


def test_what_the_training_job_knows_comes_first() -> None:
    ledger = ledger_of({**RUN, "seeded": True}, batching="shuffled")
    plain = card.make(ledger, 1e-5, {"SER": 0.5})
    made = card.make(ledger, 1e-5, {"SER": 0.5}, not_covered=[*STATEMENTS, STATEMENTS[0]])
    assert made.not_covered == [*STATEMENTS, *plain.not_covered]
    assert any("vocabulary and label sets" in text for text in plain.not_covered)
    listed = section(made.markdown(), "Not covered by ε").splitlines()
    assert listed[:2] == [f"- {text}" for text in STATEMENTS]
    assert card.stated(json.loads(made.json())) == STATEMENTS
    assert card.stated(json.loads(plain.json())) == []


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (
            ["fine", "two\nlines"],
            r"not_covered\[1\] must be 1 to 200 printable characters without .*, got 9 characters$",
        ),
        (["two\u2028lines"], r"not_covered\[0\] must be .*, got 9 characters$"),
        (["x" * 201], r"not_covered\[0\] must be .*, got 201 characters$"),
        ([""], r"not_covered\[0\] must be .*, got 0 characters$"),
        (["  "], r"not_covered\[0\] must be .*, got 2 characters$"),
        ([None], r"not_covered\[0\] must be .*, got NoneType$"),
        ("the word list", "not_covered must be a list of statements, got str$"),
        (None, "not_covered must be a list of statements, got NoneType$"),
    ],
)
def test_statements_are_short_lines(statements, message) -> None:
    with pytest.raises(ValueError, match=message):
        card.make(Ledger(), 1e-5, not_covered=statements)
    assert card.make(Ledger(), 1e-5, not_covered=("x" * 200,)).not_covered[0] == "x" * 200


def test_a_bad_delta_is_refused() -> None:
    with pytest.raises(ValueError, match="delta must be between 0 and 1"):
        card.make(Ledger(), 1.0)


def test_versions() -> None:
    versions = card.make(Ledger(), 1e-5).versions
    assert list(versions) == ["edpsgd", "torch", "dp-accounting", "python"]
    assert versions["edpsgd"] == edpsgd.__version__


def test_write_replaces_both_files_and_leaves_nothing_else(tmp_path) -> None:
    folder = tmp_path / "run" / "checkpoint"
    card.write(folder, ledger_of(RUN, z=2.0), 1e-5)
    made = card.write(folder, ledger_of(RUN), 1e-5, {"SER": 0.5}, not_covered=STATEMENTS)
    assert sorted(os.listdir(folder)) == ["privacy_card.json", "privacy_card.md"]
    data = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    assert data["epsilon"] == pytest.approx(4.37717809568122, rel=1e-9)
    assert data["delta"] == 1e-5
    assert data["not_covered"][:2] == STATEMENTS
    assert (folder / "privacy_card.md").read_text(encoding="utf-8") == made.markdown()


def test_a_failed_write_keeps_the_old_card(tmp_path, monkeypatch) -> None:
    card.write(tmp_path, ledger_of(RUN), 1e-5)
    before = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        card.write(tmp_path, ledger_of(RUN, z=0.5), 1e-5)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == before


def test_the_card_of_a_real_run(tmp_path) -> None:
    model = Bag()
    optimizer = private(model, noise_decay=edpsgd.LinearDecay(0.5), ledger=tmp_path / "ledger.jsonl", seed=3)
    for epoch in range(2):
        optimizer.set_epoch(epoch)
        set_gradients(model)
        optimizer.step()
    optimizer.ledger.close()
    made = card.make(Ledger.read(tmp_path / "ledger.jsonl"), 1e-5)
    assert [row["noise_multiplier"] for row in made.schedule] == [1.0, pytest.approx(2 / 3)]
    assert "LinearDecay(tau=0.5)" in made.facts["Noise"]
    assert any("given seed" in condition for condition in made.conditions)
    assert made.settings["clip_norm"] == 1.0
