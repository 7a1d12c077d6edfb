"""Runs that begin with another one: what they take of it, what they refuse, and what the card says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.nlu import generator, run_folder
from tasks.nlu.corpus import Corpus
from tasks.nlu.labels import Labels
from tests.helpers.jobs import run, tiny, tiny_encoder, weights

OTHER = {"data_seed": 1}  # than the earlier runs have
USUAL = {"hidden": 384, "layers": 2, "dimension": 100}  # what nobody has said
HEADS = ("intent.", "slots.", "crf.")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def public(tmp_path_factory, encoder) -> dict[str, Path]:
    """A plain run of each model, and a private one."""
    folder = tmp_path_factory.mktemp("public")
    run(tiny(folder / "bert", model="bert", pretrained=encoder, private="off"))
    run(tiny(folder / "clc", private="off"))
    run(tiny(folder / "spent", private="example"))
    return {name: folder / name for name in ("bert", "clc", "spent")}


def of_encoder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights(folder).items() if not name.startswith(HEADS)}


def more_labels(folder: Path) -> str:
    """Those of the generator and others."""
    corpus = Corpus(generator.utterances(2000))
    own = Labels.of_rows(corpus, np.arange(len(corpus)))
    slots = sorted({tag[2:] for tag in own.tags if tag != "O"})
    path = folder / "labels.json"
    content = {"intents": [*own.intents, "spare"], "slots": [*slots, "spare"]}
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_a_frozen_encoder_stays_that_of_the_earlier_run(tmp_path, public) -> None:
    """With another label set, and with heads that are its own."""
    labels, folder = more_labels(tmp_path), tmp_path / "run"
    begun = {**USUAL, **OTHER, "model": "bert", "init_from": str(public["bert"])}
    outcome = run(tiny(folder, **begun, freeze="encoder", labels=labels))
    before, after = of_encoder(public["bert"]), of_encoder(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert weights(folder)["intent.weight"].shape != weights(public["bert"])["intent.weight"].shape
    said = "the utterances of the run that this one began with: bert, trained on generated without privacy"
    assert said in outcome.card.markdown()
    assert str(public["bert"].parent) not in outcome.card.markdown()
    found = run_folder.load(folder)
    assert "spare" in found.labels.intents


def test_a_clc_begins_with_all_but_the_heads(tmp_path, public) -> None:
    folder = tmp_path / "run"
    run(tiny(folder, **USUAL, init_from=str(public["clc"]), **OTHER, epochs=1, learning_rate=1e-9))
    before, after = of_encoder(public["clc"]), of_encoder(folder)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
    new, old = weights(folder)["intent.weight"][0], weights(public["clc"])["intent.weight"][0]
    assert not torch.allclose(new, old, rtol=0, atol=1e-3)


def test_the_card_of_a_private_run_comes_along(tmp_path, public) -> None:
    folder = tmp_path / "run"
    outcome = run(tiny(folder, **USUAL, init_from=str(public["spent"]), **OTHER, epochs=1))
    page = (public["spent"] / "privacy_card.md").read_text(encoding="utf-8")
    assert (folder / "earlier_run_card.md").read_text(encoding="utf-8") == page
    assert "spent, trained on generated with ε = " in outcome.card.markdown()
    assert "of which earlier_run_card.md has the card" in outcome.card.markdown()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"model": "bert"}, "is a clc: begin with it by --model clc"),
        ({"hidden": 8}, "hidden comes from the run"),
        ({"vectors": "some.vec"}, "vectors comes from the run"),
    ],
)
def test_what_does_not_go_with_an_earlier_run(tmp_path, public, settings, wanted) -> None:
    with pytest.raises(ValueError, match=wanted):
        run(tiny(tmp_path / "run", **{**USUAL, "init_from": str(public["clc"]), **OTHER, **settings}))


def test_a_private_run_on_the_same_data_is_refused(tmp_path, public) -> None:
    """Of what the earlier run learned of them no ε would speak; plain training may go on as it likes."""
    same = {**USUAL, "init_from": str(public["clc"]), "epochs": 1}
    with pytest.raises(ValueError, match="was trained on these data, and ε would not cover that"):
        run(tiny(tmp_path / "private", **same))
    with pytest.raises(ValueError, match="was trained on these data"):  # the first of more are the same ones
        run(tiny(tmp_path / "private", **same, examples=130))
    run(tiny(tmp_path / "plain", **same, private="off"))


def test_a_run_that_has_not_ended_is_no_beginning(tmp_path, public) -> None:
    lines = (public["clc"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (public["clc"] / "metrics.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    try:
        with pytest.raises(ValueError, match="has not ended"):
            run(tiny(tmp_path / "run", **USUAL, init_from=str(public["clc"])))
    finally:
        (public["clc"] / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match="is not a run folder"):
        run(tiny(tmp_path / "run", **USUAL, init_from=str(tmp_path / "nothing")))
