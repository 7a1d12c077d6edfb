"""New models: word lists and labels, public or of the training set, and what no noise covers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, ElectraConfig, ElectraModel

from tasks.nlu import dataset, generator, label_schema, new_model, run_folder
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import Corpus, Utterance
from tasks.nlu.labels import Labels
from tests.helpers.run_folders import SMALL, saved
from tests.helpers.small_models import ENCODER


def test_word_list_has_the_training_rows_only() -> None:
    said = [Utterance((word, "Now"), ("O", "O"), "x") for word in ("Zeta", "eta", "theta")]
    config = Config(**SMALL, vocabulary="training-set")
    parts = new_model.build(config, Corpus(said), np.array([2, 0]))
    assert parts.inputs.vectors.words == ["now", "theta", "zeta"]


def test_word_list_of_a_file(corpus, tmp_path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("call\nanna call\n", encoding="utf-8")
    parts = new_model.build(Config(**SMALL, vocabulary=str(path)), corpus, np.arange(40))
    assert parts.inputs.vectors.words == ["call", "anna"]
    assert parts.model.words.weight.shape == (3, 8)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="words.txt is empty"):
        new_model.build(Config(**SMALL, vocabulary=str(path)), corpus, np.arange(40))
    for bad in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ValueError, match="cannot read the word list"):
            new_model.build(Config(**SMALL, vocabulary=str(bad)), corpus, np.arange(40))


def test_vectors_and_pretrained_are_not_mixed_up(corpus, encoder) -> None:
    for wrong in ({"model": "clc", "pretrained": encoder}, {"model": "bert", "vectors": encoder}):
        with pytest.raises(ValueError, match=f"for clc and pretrained is for bert, and the model is {wrong['model']}"):
            new_model.build(Config(**SMALL, **wrong), corpus, np.arange(40))


# ---------------------------------------------------------------- labels

SAID = Corpus(
    [
        Utterance(("call", "anna"), ("O", "B-name"), "phone"),
        Utterance(("at", "nine"), ("O", "B-time"), "clock"),
        Utterance(("at", "home"), ("O", "B-place"), "map"),
    ]
)


def with_labels(tmp_path: Path, content: str | bytes) -> run_folder.Parts:
    path = tmp_path / "labels.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return new_model.build(Config(**SMALL, labels=str(path)), SAID, np.array([0, 1]))


def test_labels_of_a_file(tmp_path) -> None:
    """More than the training set has is no harm; what only other rows have may lack; the order makes no difference."""
    content = {"intents": ["phone", "clock", "rain"], "slots": ["time", "name", "name"]}
    parts = with_labels(tmp_path, json.dumps(content))
    assert parts.labels.intents == ["clock", "phone", "rain"]
    assert parts.labels.tags == ["O", "B-name", "I-name", "B-time", "I-time"]
    saved(parts, tmp_path / "run")
    assert run_folder.load(tmp_path / "run").labels == parts.labels


def test_labels_of_the_grammar_are_public() -> None:
    """They are all that the domains have, also where the training set lacks some."""
    config = Config(**SMALL, domains="music,travel", labels="grammar")
    parts = new_model.build(config, dataset.read(replace(config, examples=3)), np.array([0, 1]))
    many = Corpus(generator.utterances(5000, domains=["music", "travel"]))
    assert parts.labels == replace(Labels.of_rows(many, np.arange(len(many))), read_from_data=False)
    assert "the label set" not in "".join(new_model.not_covered(config, parts.labels))
    assert set(generator.words(["music", "travel"])) <= set(parts.inputs.vectors.words)


def test_labels_of_the_training_set() -> None:
    parts = new_model.build(Config(**SMALL), SAID, np.array([0, 1]))
    assert parts.labels.intents == ["clock", "phone"]


@pytest.mark.parametrize(
    ("settings", "stated"),
    [
        ({}, {"the label set"}),
        ({"labels": "labels.json"}, set()),
        ({"vocabulary": "training-set"}, {"the label set", "the word list"}),
        ({"vocabulary": "training-set", "vectors": "some.vec"}, {"the label set"}),
        ({"vocabulary": "words.txt", "labels": "labels.json"}, set()),
        ({"seed": 1}, {"the label set", "whoever reads config.yaml or checkpoints/"}),
    ],
)
def test_what_no_noise_covers(settings, stated) -> None:
    """By how each statement begins; logs and counts are in every run folder."""
    always = {"metrics.jsonl, tensorboard/ and checkpoints/", "data.json and the number of training utterances"}
    found = new_model.not_covered(Config(**{**SMALL, **settings}), Labels(["call"], ["O"]))
    assert {text.partition(":")[0] for text in found} == stated | always


@pytest.mark.parametrize(
    ("intents", "slots", "lacking"),
    [
        (["phone"], ["name", "time"], "1 intents and 0 slots"),
        (["phone", "clock"], ["time"], "0 intents and 1 slots"),
        ([], [], "2 intents and 2 slots"),
    ],
)
def test_labels_that_lack_some(tmp_path, intents, slots, lacking) -> None:
    """The error counts, and names none: the labels of the training set may be private."""
    with pytest.raises(ValueError, match=f"labels.json lack {lacking} of the training set") as error:
        with_labels(tmp_path, json.dumps({"intents": intents, "slots": slots}))
    assert not any(name in str(error.value).replace(str(tmp_path), "") for name in ("phone", "clock", "name", "time"))


def test_a_schema_limits_the_tags_of_intents(tmp_path) -> None:
    parts = with_labels(tmp_path, json.dumps({"intents": {"phone": ["name"], "clock": ["time"], "rain": []}}))
    assert parts.labels == Labels(["clock", "phone", "rain"], ["O", "B-name", "I-name", "B-time", "I-time"])
    assert parts.model.heads.allowed == [[0, 3, 4], [0, 1, 2], [0]]
    saved(parts, tmp_path / "run")
    assert run_folder.load(tmp_path / "run").model.heads == parts.model.heads


def test_a_schema_that_nobody_confirmed_is_not_covered(tmp_path) -> None:
    parts = with_labels(tmp_path, label_schema.of_rows(SAID, np.array([0, 1])).text())
    assert parts.labels.read_from_data
    found = new_model.not_covered(Config(**SMALL, labels="labels.yaml"), parts.labels)
    assert found[0] == "the label set: intents and slot types were read from the training set"


def test_what_the_heads_of_a_frozen_encoder_read(tmp_path) -> None:
    """The middle and the last layer and a neighbour on each side, if nothing else is said."""
    small = {**SMALL, "model": "bert", "hidden": 384}
    chosen = new_model.build(Config(**small, freeze="encoder"), SAID, np.array([0, 1])).model
    assert (chosen.layers, chosen.window) == ([0, 2, 4], 1)
    named = new_model.build(Config(**small, features="layers:1,3,4", window=2), SAID, np.array([0, 1])).model
    assert (named.layers, named.window) == ([1, 3, 4], 2)
    usual = new_model.build(Config(**small), SAID, np.array([0, 1])).model
    assert (usual.layers, usual.window) == ([], 0)


def test_pieces_that_are_narrower_than_the_layers(tmp_path) -> None:
    """They are left out unless somebody asks for them, which is an error."""
    folder = tmp_path / "narrow"
    AutoTokenizer.from_pretrained(ENCODER).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "embedding_size": 8}
    ElectraModel(ElectraConfig(vocab_size=30522, num_hidden_layers=2, **sizes)).save_pretrained(folder)
    narrow = {**SMALL, "model": "bert", "pretrained": str(folder), "freeze": "encoder"}
    parts = new_model.build(Config(**narrow), SAID, np.array([0, 1]))
    assert parts.model.layers == [1, 2]
    with pytest.raises(ValueError, match="another width than its layers"):
        new_model.build(Config(**narrow, features="layers:0,1"), SAID, np.array([0, 1]))


def test_canaries_need_labels_that_allow_everything(tmp_path) -> None:
    path = tmp_path / "labels.yaml"
    path.write_text("intents: {phone: [name], clock: [time], map: [place]}", encoding="utf-8")
    with pytest.raises(ValueError, match="canaries have any slots with any intent"):
        new_model.build(Config(**SMALL, labels=str(path), canaries=2), SAID, np.array([0, 1]))


@pytest.mark.parametrize(("name", "value"), [("features", "auto"), ("window", 1)])
def test_settings_of_the_other_model(name, value) -> None:
    with pytest.raises(ValueError, match=f"{name} is for a frozen bert, and the model is clc"):
        new_model.build(Config(**SMALL, **{name: value}), SAID, np.array([0, 1]))
