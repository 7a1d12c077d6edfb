"""Run folders: the same answers after loading, nothing of the training set in them, and damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks import train
from tasks.nlu import generator, new_model, run_folder
from tasks.nlu.configuration import Config
from tasks.nlu.prediction import predict
from tests.helpers.run_folders import SMALL, saved
from tests.helpers.small_models import tiny_configuration

SECRET = "quetzalcoatlus"
TEXTS = [
    "call anna at nine",
    "please play xylophonists in Zürich",
    "日本 o'clock 7up",
    "\u0301",
    "call " + "x" * 90,
    "",
]


@pytest.fixture(autouse=True)
def small_paper(monkeypatch) -> None:
    monkeypatch.setattr(new_model, "paper_configuration", tiny_configuration)


@pytest.fixture
def config(request, encoder) -> Config:
    return Config(**SMALL, **{name: value or encoder for name, value in request.param.items()})


KINDS = [
    pytest.param({"model": "clc"}, id="clc-list"),
    pytest.param({"model": "clc", "vectors": None, "max_words": 3000}, id="clc-wordpieces"),
    pytest.param({"model": "bert"}, id="bert-list"),
    pytest.param({"model": "bert", "pretrained": None}, id="bert-pretrained"),
]


def randomised(parts: run_folder.Parts) -> run_folder.Parts:
    """As if it had been trained: weights that no one could make anew."""
    for parameter in parts.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    parts.model.eval()
    return parts


@pytest.mark.parametrize("config", KINDS, indirect=True)
def test_loaded_model_gives_the_same_answers(config, corpus, tmp_path) -> None:
    """Bit for bit, also for words that no table has; and in a place of its own."""
    parts = randomised(new_model.build(config, corpus, np.arange(40)))
    expected = list(predict(parts, TEXTS, batch_size=3))
    saved(parts, tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    loaded = run_folder.load(tmp_path / "moved")
    assert list(predict(loaded, TEXTS, batch_size=3)) == expected
    assert loaded.labels == parts.labels
    assert not loaded.model.training
    before, after = parts.model.state_dict(), loaded.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def holds(folder: Path, word: str) -> list[str]:
    return [p.name for p in sorted(folder.rglob("*")) if p.is_file() and word.encode() in p.read_bytes().lower()]


def secret_data(folder: Path) -> Path:
    """Generated utterances; every third says a secret, as a slot or outside of slots."""
    said = list(generator.utterances(90, seed=4))
    with open(folder / "said.jsonl", "w", encoding="utf-8") as file:
        for number, one in enumerate(said):
            words, tags = ([*one.words, SECRET], [*one.tags, "O"]) if number % 3 == 0 else (one.words, one.tags)
            words = [SECRET if tag[0] == "B" and number % 3 == 1 else w for w, tag in zip(words, tags, strict=True)]
            json.dump({"tokens": words, "tags": tags, "intent": one.intent}, file)
            file.write("\n")
    return folder / "said.jsonl"


def trained(tmp_path: Path, config: Config, *flags: str) -> Path:
    shape = ["--model", config.model, "--hidden", "8", "--layers", "1", "--dimension", "8", "--threads", "1"]
    for name in ("vectors", "pretrained"):
        shape += [f"--{name}", getattr(config, name)] if getattr(config, name) else []
    private = ["--private", "edp", "--noise-multiplier", "1", "--epochs", "1", "--batch-size", "20", "--seed", "1"]
    data = ["--task", "jsonl", "--data", str(secret_data(tmp_path)), "--output", str(tmp_path / "run")]
    train.main([*shape, *private, *data, *flags])
    return tmp_path / "run"


@pytest.mark.parametrize("config", KINDS, indirect=True)
def test_run_folder_holds_no_word_of_the_training_set(config, tmp_path, capsys) -> None:
    """No file of a whole training does, from the ledger to TensorBoard; and nothing is printed."""
    folder = trained(tmp_path, config)
    assert {"weights.safetensors", "ledger.jsonl", "privacy_card.md", "vocabulary"} <= {
        p.name for p in folder.iterdir()
    }
    assert holds(folder, SECRET) == []
    out, err = capsys.readouterr()
    assert SECRET not in (out + err).lower()
    assert "the word list" not in (folder / "privacy_card.md").read_text(encoding="utf-8")
    [answer] = predict(run_folder.load(folder), [f"call {SECRET}"])
    assert answer["text"] == f"call {SECRET}"


@pytest.mark.parametrize("config", [KINDS[0], KINDS[2]], indirect=True)
def test_word_list_of_the_training_set(config, tmp_path) -> None:
    """It is in the folder, and the card says so."""
    folder = trained(tmp_path, config, "--vocabulary", "training-set")
    assert holds(folder, SECRET) == [{"clc": "words.json", "bert": "tokenizer.json"}[config.model]]
    card = (folder / "privacy_card.md").read_text(encoding="utf-8")
    assert "the word list: it was read from the training set, and the run folder holds it" in card


# ---------------------------------------------------------------- damage

Damage = dict[str, str | None]
BROKEN: list[Damage] = [
    {"model.json": None},
    {"model.json": "{"},
    {"model.json": "[]"},
    {"model.json": "{}"},
    {"model.json": '{"kind": "cnn", "settings": {}}'},
    {"model.json": '{"kind": "clc", "settings": {"size": 3}}'},
    {"model.json": '{"kind": "bert", "settings": {"encoder": {"model_type": "?"}, "dropout": 0.1}}'},
    {"labels.json": None},
    {"labels.json": '{"intents": ["a"]}'},
    {"labels.json": '{"intents": ["a"], "tags": ["O"]}'},
    {"labels.json": "\udcff"},
    {"weights.safetensors": None},
    {"weights.safetensors": ""},
    {"weights.safetensors": "damaged"},
    {"vocabulary/words.json": None},
    {"vocabulary/words.json": "{"},
    {"vocabulary/vectors.json": "{}"},
    {"vocabulary/tokenizer.json": None},
    {"vocabulary/tokenizer.json": "{}"},
    {"vocabulary/limit.json": None},
    {"vocabulary/limit.json": "x"},
]


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: "-".join(map(str, *damage.items())))
def test_damaged_folders(corpus, tmp_path, damage) -> None:
    """A ValueError names the folder."""
    [(name, content)] = damage.items()
    kind = "bert" if "tokenizer" in name or "limit" in name else "clc"
    folder = saved(new_model.build(Config(**SMALL, model=kind), corpus, np.arange(40)), tmp_path / "run")
    run_folder.load(folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match="run is not a run folder, or it is damaged: ") as error:
        run_folder.load(folder)
    assert str(folder) in str(error.value)


def test_weights_of_another_model(corpus, tmp_path) -> None:
    folder = saved(new_model.build(Config(**SMALL), corpus, np.arange(40)), tmp_path / "run")
    other = new_model.build(Config(**{**SMALL, "hidden": 16}), corpus, np.arange(40))
    other.save_weights(folder)
    with pytest.raises(ValueError, match="(?s)run is not a run folder, or it is damaged: .*size mismatch"):
        run_folder.load(folder)


def test_no_folder(tmp_path) -> None:
    with pytest.raises(ValueError, match="none is not a run folder"):
        run_folder.load(tmp_path / "none")
