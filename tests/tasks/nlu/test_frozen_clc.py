"""CLC with ``--freeze encoder``: linear heads on fixed features, from the settings to a run folder and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mia.views import view
from models.frozen_clc import WINDOW, FrozenCLC
from tasks.nlu import configuration, generator, new_model, run_folder, training_loop
from tasks.nlu.configuration import Config, parse
from tasks.nlu.corpus import Corpus
from tasks.nlu.prediction import predict
from tests.helpers.jobs import assert_same_weights, metrics, run, tiny, weights
from tests.helpers.run_folders import saved

USUAL = {"hidden": 384, "layers": 2, "dimension": 100}  # what nobody has said
FROZEN = {**USUAL, "freeze": "encoder", "transitions": "bio", "zero_heads": True, "dropout": 0.0, "optimizer": "sgd"}
TEXTS = ["call anna at nine", "play xylophonists in Zürich", "日本 o'clock 7up", "\u0301", ""]
ROWS = np.arange(40)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory) -> str:
    """Of half of the generator's words."""
    path = tmp_path_factory.mktemp("vectors") / "tiny.vec"
    words = generator.words()[::2]
    rows = np.random.default_rng(0).normal(size=(len(words), 6)).round(3)
    lines = [f"{word} {' '.join(map(str, row))}\n" for word, row in zip(words, rows, strict=True)]
    path.write_text(f"{len(words)} 6\n{''.join(lines)}", encoding="utf-8")
    return str(path)


def settings(folder: Path, vectors: str, **more) -> Config:
    return tiny(folder, vectors=vectors, **{**FROZEN, **more})


def test_its_model_has_no_encoder_and_a_window(tmp_path, vectors, corpus) -> None:
    model = new_model.build(settings(tmp_path, vectors), corpus, ROWS).model
    assert isinstance(model, FrozenCLC)
    assert model.window == WINDOW
    assert new_model.build(settings(tmp_path, vectors, window=0), corpus, ROWS).model.window == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"vectors": None}, "freeze encoder needs vectors"),
        ({"freeze": "layers:1"}, "freeze must be none or encoder where the model is clc, got 'layers:1'"),
        ({"features": "auto"}, "features is for a frozen bert, and the model is clc: got auto"),
        ({"keep_features": True}, "keep_features is for a frozen bert, and the model is clc"),
        ({"init_from": "some/run"}, "init_from takes the BiLSTM of another run"),
        ({"pretrained": "some/encoder"}, "vectors are for clc and pretrained is for bert"),
        ({"train_vectors": True, "hidden": 8, "layers": 1}, "leave train_vectors, hidden, layers out"),
        ({"word_dropout": 0.1, "vocabulary": "words.txt"}, "leave vocabulary, word_dropout out"),
    ],
)
def test_settings_that_do_not_apply_are_refused(tmp_path, vectors, corpus, wrong, said) -> None:
    with pytest.raises(ValueError, match=said):
        new_model.build(settings(tmp_path, **{"vectors": vectors, **wrong}), corpus, ROWS)


def test_a_run_folder_gives_the_same_answers(tmp_path, vectors, corpus) -> None:
    """To people and to attacks, from heads that no one could make anew."""
    parts = new_model.build(settings(tmp_path, vectors), corpus, ROWS)
    for head in (parts.model.slots, parts.model.intent):
        torch.nn.init.normal_(head.weight, std=0.1)
    parts.model.eval()
    loaded = run_folder.load(saved(parts, tmp_path / "run"))
    assert list(predict(loaded, TEXTS)) == list(predict(parts, TEXTS))
    own = [np.flatnonzero(corpus.intent_ids == number)[0] for number in range(len(corpus.intents))]
    found, expected = (view(one, corpus, np.array(own)) for one in (loaded, parts))
    assert np.isfinite(found.log_probabilities).all()
    np.testing.assert_array_equal(found.log_probabilities, expected.log_probabilities)


def test_a_private_run_trains_the_heads_alone_and_can_be_resumed(tmp_path, vectors, monkeypatch) -> None:
    """With canaries; an interrupted one ends with the same weights."""
    common = {"private": "example", "sampling": "poisson", "seed": 5, "checkpoint_every": 2, "canaries": 4}
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    assert run(settings(whole, vectors, **common)).epsilon is not None
    before, after = new_words(vectors), weights(whole)
    assert torch.equal(after["words.weight"][1:], before)
    with pytest.raises(ValueError, match="trained heads alone, and has nothing to begin with"):
        run(tiny(tmp_path / "later", **USUAL, init_from=str(whole), data_seed=1))
    assert after["slots.weight"].any()
    take = training_loop.Training._step

    def stops(self, *arguments) -> None:
        if self.state.step == 7:
            raise KeyboardInterrupt
        take(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training_loop.Training, "_step", stops)
        with pytest.raises(KeyboardInterrupt):
            run(settings(halted, vectors, **common))
    run(parse(["--resume", str(halted)])[0], resume=halted)
    assert_same_weights(whole, halted)


def new_words(vectors: str) -> torch.Tensor:
    """The scaled table of a file."""
    return torch.from_numpy(new_model.word_vectors.load(vectors).table)


def test_one_pass_gives_the_result_of_the_loop(tmp_path, vectors, monkeypatch) -> None:
    common = {"batch_size": 3, "micro_batches": 4, "seed": 5, "learning_rate": 0.1}
    once = run(settings(tmp_path / "once", vectors, **common))
    monkeypatch.setattr(configuration, "FEW", 1)
    loop = run(settings(tmp_path / "loop", vectors, **common))
    for name, tensor in weights(once.folder).items():
        torch.testing.assert_close(tensor, weights(loop.folder)[name], rtol=1e-3, atol=1e-5)
    texts = ["in one backward pass" in " ".join(one.epsilon.conditions) for one in (once, loop)]
    assert texts == [True, False]


def test_a_schema_limits_its_answers(tmp_path, vectors) -> None:
    said = Corpus(generator.utterances(120, seed=0))
    slots: dict[str, set[str]] = {intent: set() for intent in said.intents}
    for one in said:
        slots[one.intent] |= {kind for kind, _, _ in one.slots()}
    path = tmp_path / "labels.json"
    path.write_text(json.dumps({"intents": {name: sorted(own) for name, own in slots.items()}}), encoding="utf-8")
    folder = run(settings(tmp_path / "run", vectors, private="example", labels=str(path))).folder
    assert metrics(folder)[-1]["test_ser"] >= 0
    assert run_folder.load(folder).model.forbidden is not None
