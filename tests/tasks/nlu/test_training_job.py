"""A training job in one process: what it leaves, what its card says, and its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import edpsgd
from edpsgd.distributed.collectives import Local
from edpsgd.ledger.guarantee import format_epsilon
from tasks.nlu import run_folder
from tasks.nlu.corpus import Corpus
from tasks.nlu.evaluation import evaluate
from tasks.nlu.example_batches import Examples
from tasks.nlu.generator import utterances
from tasks.nlu.noise_plan import make_plan
from tasks.nlu.samplers import make_batches
from tasks.nlu.splits import split
from tasks.nlu.training_job import train
from tests.helpers.jobs import here, metrics, run, tiny, tiny_encoder, weights
from tests.helpers.training_commands import ALWAYS, names


def card(folder: Path) -> dict:
    return json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))


def test_the_metrics(tmp_path) -> None:
    outcome = run(tiny(tmp_path / "run"))
    *epochs, last = metrics(tmp_path / "run")
    assert [(line["epoch"], line["step"]) for line in epochs] == [(0, 5), (1, 10)]
    for number, line in enumerate(epochs, 1):
        assert line["epsilon"] == pytest.approx(edpsgd.accounting.gaussian_epsilon([1.0] * number, 5e-4))
        assert (line["noise_multiplier"], line["discarded"], line["validation_utterances"]) == (1.0, 0, 6)
        assert 0 <= line["clip_fraction"] <= 1
        assert line["loss"] > 0
    assert {name: last[f"test_{name}"] for name in outcome.metrics} == outcome.metrics
    assert (last["step"], last["epsilon"], last["test_utterances"]) == (10, float(outcome.epsilon), 62)
    assert last["seconds"] == pytest.approx(outcome.seconds, abs=1e-3)
    assert outcome.seconds >= epochs[0]["seconds"] > 0


@pytest.mark.parametrize("model", ["clc", "bert"])
def test_the_weights_are_those_that_were_tested(tmp_path, model) -> None:
    """Whoever loads the run folder finds the same error rates."""
    encoder = {"pretrained": tiny_encoder(tmp_path / "encoder")} if model == "bert" else {}
    settings = {"model": model, "private": "off", "learning_rate": 0.02, "head_learning_rate": 0.05, **encoder}
    outcome = run(tiny(tmp_path / "run", epochs=4, **settings))
    assert outcome.metrics["ser"] < 200  # something was learned, and not by every utterance alike
    parts, corpus = run_folder.load(outcome.folder), Corpus(utterances(120, seed=0))
    test = Examples(corpus, split(corpus).test, parts.inputs.table(corpus.words), parts.labels)
    local = edpsgd.distributed.collectives.Local()
    assert evaluate(parts.model, test, parts.labels, local, torch.device("cpu")) == outcome.metrics


def test_plain_training_leaves_no_card(tmp_path, capsys) -> None:
    outcome = run(tiny(tmp_path / "run", private="off"))
    assert names(tmp_path / "run") == {*ALWAYS, "checkpoints"}
    assert (outcome.epsilon, outcome.card) == (None, None)
    assert all("epsilon" not in line and "noise_multiplier" not in line for line in metrics(tmp_path / "run"))
    assert "ε" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("private", "sensitivity", "neighbours"),
    [("edp", 2.0, "replace or blank one example"), ("example", 1.0, "blank one example")],
)
def test_the_unit_of_privacy(tmp_path, private, sensitivity, neighbours) -> None:
    outcome = run(tiny(tmp_path / "run", private=private, batch_size=6, epochs=1))
    found = card(tmp_path / "run")
    unit = "example" if private == "example" else "micro_batch"
    assert (found["settings"]["unit"], found["settings"]["sensitivity"]) == (unit, sensitivity)
    assert (found["neighbours"], found["epsilon"]) == (neighbours, float(outcome.epsilon))
    ledger = edpsgd.Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert [(e.batching, e.steps) for e in ledger.events] == [("shuffled", 9)]


# -------------------------------------------------------------------- the card


def test_the_card_names_the_label_set_and_the_seed(tmp_path) -> None:
    run(tiny(tmp_path / "a", seed=5))
    assert any("label set" in text for text in card(tmp_path / "a")["not_covered"])
    assert any("seed" in text for text in card(tmp_path / "a")["conditions"])
    assert card(tmp_path / "a")["metrics"].keys() >= {"test_ser", "test_intent_accuracy", "test_slot_f1"}


def test_public_labels_and_a_private_word_list(tmp_path) -> None:
    labels = json.loads((run(tiny(tmp_path / "a", epochs=1)).folder / "labels.json").read_text())
    slots = sorted({tag[2:] for tag in labels["tags"][1:]})
    file = tmp_path / "labels.json"
    file.write_text(json.dumps({"intents": [*labels["intents"], "another"], "slots": slots}))
    run(tiny(tmp_path / "b", epochs=1, labels=str(file), vocabulary="training-set"))
    own = edpsgd.card.stated(card(tmp_path / "b"))
    assert any(text.startswith("the word list: it was read from the training set") for text in own)
    assert not any(text.startswith("the label set") for text in own)
    assert len(weights(tmp_path / "b")["intent.bias"]) == len(labels["intents"]) + 1

    file.write_text(json.dumps({"intents": labels["intents"][1:], "slots": slots}))
    with pytest.raises(ValueError, match="lack 1 intents and 0 slots") as refused:
        run(tiny(tmp_path / "c", labels=str(file)))
    assert labels["intents"][0] not in str(refused.value)


DELTA = 5e-4


# -------------------------------------------------------------------- the dry run


def dry_run(config, capsys) -> str:
    assert train(config, here("local", Local()), dry_run=True) is None
    return capsys.readouterr().out


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys) -> None:
    config = tiny(tmp_path / "run", epsilon=3.0, decay="linear:0.5", epochs=4, delta=DELTA)
    said = dry_run(config, capsys)
    plan = make_plan(config, make_batches(config, 52, Local()), 1)
    assert "52 train, 6 validation, 62 test" in said
    assert f"{plan.noise_multiplier:.6g} in the first epoch, {plan.noise_multiplier / 2.5:.6g} in the last" in said
    for bound in plan.report.bounds:
        assert f"{format_epsilon(bound.epsilon)} at δ = 0.0005 ({bound.method}" in said
    assert "condition" not in said
    assert "note: δ" not in said
    assert list(tmp_path.iterdir()) == []


def test_no_epsilon_is_printed_without_its_conditions(tmp_path, capsys) -> None:
    said = dry_run(tiny(tmp_path, layer_scaling="raw", seed=3, sampling="poisson"), capsys)
    assert "on condition: the layer scales are raw first-step norms" in said
    assert "on condition: the noise comes from a given seed" in said
    assert "on condition: the batches come from a given seed" in said


def test_a_delta_above_one_over_the_number_of_utterances(tmp_path, capsys) -> None:
    assert "note: δ is above 1/52" in dry_run(tiny(tmp_path, delta=0.02), capsys)
    assert "note: δ" not in dry_run(tiny(tmp_path, delta=0.019), capsys)
