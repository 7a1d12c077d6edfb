"""The training command: its run folder, what it refuses, and what it never writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.nlu.corpus import Corpus
from tasks.nlu.generator import utterances
from tasks.nlu.splits import split
from tasks.train import main
from tests.helpers.jobs import tiny_encoder
from tests.helpers.training_commands import ALWAYS, failure, flags, names

CARD = {"ledger.jsonl", "privacy_card.md", "privacy_card.json"}


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


def test_a_frozen_clc_needs_vectors_and_has_no_layers(tmp_path) -> None:
    frozen = {"model": "clc", "freeze": "encoder"}
    assert "freeze encoder needs vectors" in failure(flags(tmp_path / "run", **frozen))
    said = failure(flags(tmp_path / "run", **frozen, vectors="some.vec"))
    assert "leave dimension, hidden, layers out" in said


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


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_processor_without_half_precision(tmp_path, monkeypatch, more) -> None:
    monkeypatch.setattr("tasks.nlu.training_job.has_bf16", lambda device: False)
    message = failure([*flags(tmp_path / "run", precision="bf16"), *more])
    assert message == "error: --precision bf16: this processor has no instructions for it, use fp32"
    assert not (tmp_path / "run").exists()


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
