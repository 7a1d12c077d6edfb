"""The privacy card: what it says, and what it leaves out."""

from __future__ import annotations

import json
import math
import os

import pytest
from scipy.stats import norm

import edpsgd
from edpsgd import card
from edpsgd.ledger import Ledger
from tests.helpers.common import Bag, private, set_gradients

RUN = {
    "workers": 4,
    "clip_norm": 0.75,
    "noise_multiplier": 1.0,
    "noise_decay": "LinearDecay(tau=0.1)",
    "clipping": "flat",
    "unit": "micro_batch",
    "layer_scaling": None,
    "noise": "calibrated",
    "noise_placement": "sharded",
    "divisor": None,
    "compression": None,
    "seeded": False,
    "sensitivity": 1.5,
    "batches": None,
}
SHUFFLED = {
    "kind": "shuffled",
    "examples": 1000,
    "batch_size": 8,
    "micro_batches": 2,
    "steps_per_epoch": 16,
    "seeded": False,
    "order_compared": True,
}
POISSON = {
    "kind": "poisson",
    "examples": 1234,
    "sampling_rate": 0.01,
    "micro_batches": 1,
    "steps_per_epoch": 100,
    "seeded": False,
    "slots": "drawn",
    "order_compared": True,
}


def ledger_of(*runs: dict, epochs: int = 1, z: float = 1.0, tau: float = 0.0, steps: int = 3, **event) -> Ledger:
    ledger = Ledger()
    for run in runs:
        ledger.begin_run(run)
    for epoch in range(epochs):
        ledger.open_epoch(epoch, **event)
        for _ in range(steps):
            ledger.charge(z / (1 + tau * epoch))
    return ledger


def text_of(changes: dict, **kwargs) -> str:
    return card.make(ledger_of({**RUN, **changes}, **kwargs), 1e-5).markdown()


def section(markdown: str, title: str) -> str:
    return markdown.split(f"## {title}\n\n")[1].split("\n\n## ")[0]


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


@pytest.mark.parametrize(("unit", "meaning"), [("micro_batch", "replaced by any other"), ("example", "is blank in")])
def test_unit_of_privacy_of_shuffled_batches(unit: str, meaning: str) -> None:
    text = section(text_of({"unit": unit}), "Unit of privacy")
    assert text.startswith("One example, in language data one utterance.")
    assert meaning in text


def test_sampling() -> None:
    assert "user's word" in section(text_of({}), "Sampling")
    vouched = section(text_of({"batches": SHUFFLED}, batching="shuffled"), "Sampling")
    assert "the sampler vouches" in vouched
    assert "1000 examples, 16 steps in an epoch, 2 micro-batches per worker in a step, of 8 examples each" in vouched
    single = section(text_of({"batches": {**POISSON, "micro_batches": None}}, batching="poisson"), "Sampling")
    assert "every example a micro-batch of its own" in single


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


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, "None: all layers alike."),
        ({"a": 0.5, "b": 1.25}, "Given by the user for 2 layers, between 0.5 and 1.25: they must come from public"),
        (repr(edpsgd.FirstStepNorms(2.5)), "Measured privately in the first step, with noise multiplier 2.5;"),
        (repr(edpsgd.FirstStepNorms()), "Raw norms of the first private gradients"),
    ],
)
def test_layer_scales(scaling: object, expected: str) -> None:
    text = text_of({"layer_scaling": scaling})
    assert section(text, "Layer scales").startswith(expected)
    assert ("raw norms" in section(text, "Not covered by ε")) == expected.startswith("Raw")


def test_raw_scales_of_an_earlier_run_stay_uncovered() -> None:
    ledger = Ledger()
    ledger.begin_run(RUN)
    ledger.charge_layer_norms(0.0)
    made = card.make(ledger, 1e-5)
    assert any("raw norms" in item for item in made.not_covered)
    assert any("raw first-step norms" in item for item in made.conditions)


def test_trust() -> None:
    sharded = section(text_of({}), "Workers and trust")
    assert sharded.startswith("4 workers, noise placement sharded.")
    assert "sees bare the coordinates that this worker does not noise" in sharded
    assert "the network between them are trusted" in sharded
    per_worker = section(text_of({"noise_placement": "per_worker"}), "Workers and trust")
    assert "c workers who collude know c/N of the noise variance" in per_worker
    assert "accounted multiplier over √N" in per_worker
    assert "bare" not in per_worker
    alone = section(text_of({"workers": 1}), "Workers and trust")
    assert alone.startswith("One worker")
    assert "collude" not in alone


def test_noise_and_clipping() -> None:
    text = text_of({"divisor": 32.0, "unit": "example", "compression": "bf16"}, epochs=3, tau=0.1)
    assert "Multiplier 1 in epoch 0, decay: `LinearDecay(tau=0.1)`." in section(text, "Noise")
    assert "Accounted: 1 first, 0.833333 last." in section(text, "Noise")
    assert "published" not in text
    clipping = section(text, "Clipping")
    assert clipping.startswith("Norm 0.75, flat, all layers together. The gradient of every example")
    assert "sensitivity 1.5. The sum is divided by 32" in clipping
    assert "bf16" in clipping
    plain = text_of({"clipping": "per_layer", "noise_decay": None})
    assert "Norm 0.75, each layer by itself. The average gradient of a micro-batch" in section(plain, "Clipping")
    assert "decay: none" in section(plain, "Noise")
    assert "divided" not in plain
    assert "Gradients travel" not in plain


def test_the_published_algorithm_is_marked_and_accounted_with_its_real_multiplier() -> None:
    model = Bag()
    optimizer = private(model, noise="paper")
    optimizer.set_epoch(0)
    set_gradients(model)
    optimizer.step()
    made = card.make(optimizer.ledger, 1e-5)
    assert "the published algorithm as printed" in made.facts["Noise"]
    assert "max α" in made.facts["Noise"]
    assert made.schedule[0]["noise_multiplier"] == 0.5  # one worker: z/2
    delta = norm.cdf(1 - made.epsilon / 2) - math.exp(made.epsilon) * norm.cdf(-1 - made.epsilon / 2)
    assert delta == pytest.approx(1e-5, rel=1e-6)  # of the Gaussian mechanism with μ = 1/z = 2
    layered = text_of({"noise": "paper", "clipping": "per_layer"})
    assert "z/(2·√(N·K))." in layered


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


def test_statements_are_text_in_markdown() -> None:
    made = card.make(Ledger(), 1e-5, not_covered=["a <b> tag"])
    assert "- a &lt;b> tag\n" in made.markdown()
    assert made.not_covered[0] == "a <b> tag"


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


def test_an_empty_ledger_and_unknown_settings() -> None:
    made = card.make(Ledger(), 1e-5)
    assert made.epsilon == 0
    assert "0 steps." in made.markdown()
    assert "Norm not recorded, kind not recorded" in made.markdown()
    assert "not recorded workers, noise placement not recorded" in made.markdown()


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
