"""A training job in one process: its run folder, what its card says, what it refuses, and what it never writes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import edpsgd
from models.heads import IntentSlotModel
from tasks.nlu import configuration, new_model, run_folder
from tasks.nlu.corpus import Corpus
from tasks.nlu.evaluation import evaluate
from tasks.nlu.example_batches import Examples
from tasks.nlu.generator import utterances
from tasks.nlu.splits import split
from tasks.nlu.training_loop import Training
from tasks.train import main
from tests.helpers.common import needs_bf16, quiet
from tests.helpers.jobs import TINY, metrics, run, tiny, tiny_encoder, weights

ALWAYS = {"config.yaml", "data.json", "labels.json", "model.json", "vocabulary", "weights.safetensors", "metrics.jsonl"}
CARD = {"ledger.jsonl", "privacy_card.md", "privacy_card.json"}


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def card(folder: Path) -> dict:
    return json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))


def flags(folder: Path, **settings) -> list[str]:
    """The command line of a job."""
    given = tiny(folder, **settings)
    shown = {name: value for name, value in given.given().items() if name in {*TINY, "output", *settings}}
    if given.noise_multiplier is not None:
        shown["noise_multiplier"] = given.noise_multiplier
    shown.pop("tensorboard")
    pairs = [part for name, value in shown.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [*pairs, "--no-tensorboard"]


def failure(arguments: list[str]) -> str:
    """The message with which the command ends; its exit code is then 1."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, str)
    return ended.value.code


# -------------------------------------------------------------------- what a job leaves


def long_utterances(folder: Path) -> Path:
    """Sixty generated utterances, two of them with ninety words."""
    lines = [{"tokens": u.words, "tags": u.tags, "intent": u.intent} for u in utterances(58)]
    lines += [{"tokens": ["call"] * 90, "tags": ["O"] * 90, "intent": lines[0]["intent"]}] * 2
    (folder / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder / "long.jsonl"


def test_utterances_that_are_too_long_are_found_by_a_dry_run_and_can_be_left_out(tmp_path, capsys) -> None:
    encoder = {"model": "bert", "pretrained": str(tiny_encoder(tmp_path / "encoder"))}
    command = flags(tmp_path / "run", task="jsonl", data=str(long_utterances(tmp_path)), **encoder)
    assert "2 of 60 utterances have more than the" in failure([*command, "--dry-run"])
    main([*command, "--dry-run", "--longest", "60"])
    said = capsys.readouterr().out
    assert "jsonl: 58 utterances" in said
    assert "2 left out" in said
    assert not (tmp_path / "run").exists()


def test_freezing_is_for_encoders(tmp_path) -> None:
    assert "freeze is for bert" in failure(flags(tmp_path / "run", model="clc", freeze="encoder"))


def test_the_run_folder_of_a_private_job(tmp_path, capsys) -> None:
    main(flags(tmp_path / "run", seed=3))
    said = capsys.readouterr().out
    assert names(tmp_path / "run") == {*ALWAYS, *CARD, "checkpoints"}
    assert f"run folder: {tmp_path / 'run'}" in said
    assert "# Privacy card" in said
    corpus = Corpus(utterances(120, seed=0))
    parts = split(corpus)
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert {name: data[name] for name in vars(parts)} == {name: len(rows) for name, rows in vars(parts).items()}
    labels = json.loads((tmp_path / "run" / "labels.json").read_text())
    assert labels["intents"] == sorted({corpus[row].intent for row in parts.train})
    slots = sorted({kind for row in parts.train for kind, _, _ in corpus[row].slots()})
    assert labels["tags"] == ["O", *(f"{prefix}-{slot}" for slot in slots for prefix in "BI")]


def test_a_folder_that_nobody_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run(tiny(tmp_path, output=None, epochs=1, private="off")).folder
    assert re.fullmatch(r"runs/generated-clc-off-\d{8}-\d{6}", str(folder))
    assert (tmp_path / folder / "weights.safetensors").exists()


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


@pytest.mark.parametrize(("sampling", "batch_size", "micro_batches"), [("shuffled", 3, 4), ("poisson", 1, 2)])
def test_small_micro_batches_are_clipped_in_one_pass(
    tmp_path, monkeypatch, sampling, batch_size, micro_batches
) -> None:
    """With the result of the loop, which larger ones take; a Poisson draw leaves whole steps empty."""
    common = {"batch_size": batch_size, "micro_batches": micro_batches, "sampling": sampling, "dropout": 0.0}
    once = run(tiny(tmp_path / "once", seed=5, **common))
    monkeypatch.setattr(configuration, "FEW", 1)
    loop = run(tiny(tmp_path / "loop", seed=5, **common))
    for name, tensor in weights(once.folder).items():
        torch.testing.assert_close(tensor, weights(loop.folder)[name], rtol=1e-3, atol=1e-5)
    texts = ["in one backward pass" in " ".join(o.epsilon.conditions) for o in (once, loop)]
    assert texts == [True, False]
    assert float(once.epsilon) == float(loop.epsilon)


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


@needs_bf16
@pytest.mark.parametrize("model", ["clc", "bert"])
@pytest.mark.parametrize("private", ["off", "edp", "example"])
def test_half_precision(tmp_path, model, private) -> None:
    """A little noise of rounding, and nothing more: nothing is discarded, and the loss is nearly the same."""
    settings = {"model": model, "private": private, "seed": 2, "epochs": 1, "noise_multiplier": 1e-3}
    for precision in ("fp32", "bf16"):
        run(tiny(tmp_path / precision, precision=precision, **settings))
    exact, rounded = (metrics(tmp_path / precision)[0] for precision in ("fp32", "bf16"))
    assert rounded["loss"] != exact["loss"]
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.01)
    assert rounded.get("discarded", 0) == 0
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16").values()} == {torch.float32}


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_processor_without_half_precision(tmp_path, monkeypatch, more) -> None:
    monkeypatch.setattr("tasks.nlu.training_job.has_bf16", lambda device: False)
    message = failure([*flags(tmp_path / "run", precision="bf16"), *more])
    assert message == "error: --precision bf16: this processor has no instructions for it, use fp32"
    assert not (tmp_path / "run").exists()


def test_tensorboard(tmp_path) -> None:
    run(tiny(tmp_path / "run", tensorboard=True))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    for line in metrics(tmp_path / "run")[:-1]:
        for name in line.keys() - {"epoch", "step"}:
            [found] = [event.value for event in board.Scalars(name) if event.step == line["step"]]
            assert found == pytest.approx(line[name], rel=1e-6), name
    assert {"loss", "epsilon", "clip_fraction", "validation_ser"} <= set(board.Tags()["scalars"])


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"warmup": 0.2}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ({"warmup": 0.0}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"warmup": 0.4, "schedule": "constant"}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_learning_rates(tmp_path, monkeypatch, settings, factors) -> None:
    """Of the encoder and of the heads, in each of the ten steps."""
    take, seen = Training._step, []

    def step(self, *arguments) -> None:
        take(self, *arguments)
        seen.append([group["lr"] for group in self.optimizer.param_groups])

    monkeypatch.setattr(Training, "_step", step)
    run(tiny(tmp_path / "run", private="off", learning_rate=0.01, head_learning_rate=0.03, **settings))
    assert seen == [pytest.approx([0.01 * factor, 0.03 * factor]) for factor in factors]


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


# -------------------------------------------------------------------- private text


def test_no_private_text_leaves_the_data(tmp_path, capfd) -> None:
    """A word that only the training set has is in no file and on no terminal; labels and word list are public."""
    corpus = Corpus(utterances(120, seed=0))
    training = set(split(corpus).train.tolist())
    file = tmp_path / "private.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for row, said in enumerate(corpus):
            words = [*said.words, "zyxomma"] if row in training else said.words
            tags = [*said.tags, "B-time"] if row in training else said.tags
            lines.write(json.dumps({"tokens": words, "tags": tags, "intent": said.intent}) + "\n")
    public = tmp_path / "labels.json"
    kinds = {kind for said in corpus for kind, _, _ in said.slots()}
    public.write_text(json.dumps({"intents": corpus.intents, "slots": sorted({*kinds, "time"})}))
    settings = {"task": "jsonl", "data": str(file), "labels": str(public), "split": "hash", "epochs": 1}
    main([*flags(tmp_path / "run", **settings), "--tensorboard"])
    said = capfd.readouterr()
    assert "zyxomma" not in said.out + said.err
    files = [found for found in (tmp_path / "run").rglob("*") if found.is_file()]
    assert len(files) > 12
    assert [found for found in files if b"zyxomma" in found.read_bytes().lower()] == []


def test_an_unreadable_line_is_named_and_not_quoted(tmp_path) -> None:
    file = tmp_path / "private.jsonl"
    file.write_text('{"tokens": ["call", "zyxomma"], "tags": ["O"], "intent": "call"}\n')
    said = failure(flags(tmp_path / "run", task="jsonl", data=str(file)))
    assert said == f"error: {file}:1: there are 1 tags for 2 words"
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------- what goes wrong


def test_too_few_utterances(tmp_path) -> None:
    said = failure(flags(tmp_path / "run", examples=4))
    assert "4 utterances are too few to train, validate and test on: " in said
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_training_set(tmp_path) -> None:
    run(tiny(tmp_path / "run", batch_size=500))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 2]
    assert "smaller batch_size" in failure(flags(tmp_path / "other", batch_size=500, sampling="poisson"))


def test_a_folder_that_holds_a_run(tmp_path) -> None:
    run(tiny(tmp_path / "run", epochs=1))
    before = weights(tmp_path / "run")
    assert f"--resume {tmp_path / 'run'}" in failure(flags(tmp_path / "run"))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(tmp_path / "run").items())
    (tmp_path / "run" / "config.yaml").unlink()
    assert "without a config.yaml" in failure(flags(tmp_path / "run"))


def test_a_folder_that_cannot_be_made(tmp_path) -> None:
    (tmp_path / "file").touch()
    said = failure(flags(tmp_path / "file" / "run"))
    assert said.startswith("error: ")
    assert str(tmp_path / "file") in said


def test_a_checkpoint_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    assert str(tmp_path / "run" / "checkpoints") in failure(flags(tmp_path / "run"))


@pytest.mark.parametrize(
    "settings",
    [
        {"decay": "quadratic:1"},
        {"layer_scaling": "private:none"},
        {"vectors": "missing.vec"},
        {"vocabulary": "missing.txt"},
        {"labels": "missing.json"},
        {"task": "jsonl", "data": "missing.jsonl"},
        {"model": "bert", "pretrained": str(Path(__file__).parent)},
        {"model": "bert", "freeze": "layers:9"},
    ],
)
def test_settings_that_turn_out_wrong_later(tmp_path, settings) -> None:
    [wrong] = list(settings.values())[-1:]
    assert wrong in failure(flags(tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_weights_that_are_no_numbers_end_plain_training(tmp_path) -> None:
    said = failure(flags(tmp_path / "run", private="off", learning_rate=1e30, epochs=3, checkpoint_every=3))
    assert "after step 3 the model holds NaN or infinities" in said
    assert "smaller learning_rate" in said
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_loss_that_is_no_number_is_left_out_of_private_training(tmp_path, monkeypatch) -> None:
    """The micro-batch counts as zero; the weights stay numbers, and the metrics stay JSON."""
    forward, calls = IntentSlotModel.forward, []

    def sometimes(self, batch):
        calls.append(None)
        return forward(self, batch) * (math.nan if len(calls) == 2 else 1.0)

    monkeypatch.setattr(IntentSlotModel, "forward", sometimes)
    monkeypatch.setattr(edpsgd, "check_losses", lambda *_, **__: None)  # it would see this before the first step
    with pytest.warns(UserWarning, match="1 micro-batch.* held NaN"):
        run(tiny(tmp_path / "run"))
    first, second, _ = metrics(tmp_path / "run")
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert (first["loss"], first["discarded"]) == (None, 1)
    assert second["loss"] > 0
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "run").values())
    assert edpsgd.Ledger.read(tmp_path / "run" / "ledger.jsonl").events[0].steps == 5  # it is paid for all the same


def test_a_model_that_keeps_statistics_is_refused(tmp_path, monkeypatch) -> None:
    build = new_model.build

    def with_statistics(*arguments):
        parts = build(*arguments)
        parts.model.norm = torch.nn.BatchNorm1d(3)
        return parts

    monkeypatch.setattr(new_model, "build", with_statistics)
    with quiet(), pytest.raises(ValueError, match="running statistics"):
        run(tiny(tmp_path / "run"))


@pytest.mark.parametrize("private", ["edp", "example"])
def test_losses_that_depend_on_other_utterances_are_refused(tmp_path, monkeypatch, private) -> None:
    """Before the first step, so that nothing was charged; plain training has nobody to protect."""
    losses = IntentSlotModel.forward
    monkeypatch.setattr(IntentSlotModel, "forward", lambda self, batch: losses(self, batch) / len(batch["mask"]))
    assert "in its batch" in failure(flags(tmp_path / "run", private=private))
    assert not edpsgd.Ledger.read(tmp_path / "run" / "ledger.jsonl").events
    run(tiny(tmp_path / "plain", private="off"))


def test_the_optimizer_knows_that_losses_were_checked(tmp_path, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(edpsgd.PrivateOptimizer, "note_checked_losses", lambda self: told.append(True))
    run(tiny(tmp_path / "run"))
    assert told == [True]
