"""Canaries: random, in or out by a coin, trained on only if they are in, and found again in the run folder."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mia import canaries as seen
from mia.audit import main as audit
from mia.candidates import candidates, open_run
from tasks import canaries
from tasks.data import load
from tasks.examples import Labels
from tasks.generate import words
from tests.jobs import run, tiny

LABELS = Labels.of_slots(["call", "stop", "play"], ["name", "place"])


def make(number: int, seed: int, is_replaced: bool = False) -> list[canaries.Canary]:
    return canaries.make(number, LABELS, is_replaced, seed)


def test_half_of_them_are_in_and_no_two_are_alike() -> None:
    """Four standard deviations of a fair coin are 63 of 1000."""
    found = make(1000, seed=5, is_replaced=True)
    assert abs(sum(one.inside for one in found) - 500) < 63
    said = [utterance for one in found for utterance in (one.said, one.instead)]
    assert len(set(said)) == 2000
    assert {word for one in said for word in one.words} <= set(words())
    assert {one.intent for one in said} == set(LABELS.intents)
    assert {tag for one in said for tag in one.tags} == {"O", "B-name", "B-place"}


def test_another_seed_other_canaries_and_coins() -> None:
    first, again, other = make(50, 1), make(50, 1), make(50, 2)
    assert first == again
    assert not {one.said for one in first} & {one.said for one in other}
    assert [one.inside for one in first] != [one.inside for one in other]


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_those_that_are_in_are_trained_on(tmp_path, sampling) -> None:
    """Where neighbours replace an utterance, so do the coins: the number of utterances says nothing about them."""
    plain, data = (load(tiny(tmp_path, canaries=n, sampling=sampling), None, seed=3) for n in (0, 10))
    inside = [one.said for one in data.canaries if one.inside]
    added = np.arange(len(plain.corpus), len(data.corpus))
    trained = [data.corpus[row] for row in added]
    assert len(trained) == (10 if sampling == "shuffled" else len(inside))
    assert set(trained) & {one.said for one in data.canaries} == set(inside)
    assert data.rows.train.tolist() == [*plain.rows.train, *added]
    assert data.rows.test.tolist() == plain.rows.test.tolist()
    assert data.without_canaries().train.tolist() == plain.rows.train.tolist()
    assert plain.without_canaries().train.tolist() == plain.rows.train.tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("canaries") / "run"
    run(tiny(folder, canaries=20, epochs=1))
    return folder


def test_the_run_folder_knows_them(folder) -> None:
    found = open_run(folder)
    assert found.data.canaries == canaries.load(folder)
    assert json.loads((folder / "data.json").read_text())["train"] == len(found.data.rows.train)
    assert candidates(found.data, found.parts.labels).rows.max() < 120  # canaries are no candidates


def test_what_the_model_says_of_them(folder) -> None:
    scores, inside = seen.scores(folder)
    assert inside.tolist() == [one.inside for one in canaries.load(folder)]
    assert scores.shape == (20,)
    assert (scores < 0).all()


def test_a_resumed_run_has_the_same(folder, tmp_path) -> None:
    config = tiny(folder, canaries=20, epochs=1)
    assert load(config, folder, seed=99).canaries == canaries.load(folder)
    with pytest.raises(ValueError, match="canaries.jsonl is not a file of canaries, or it is damaged: FileNotFound"):
        load(config, tmp_path, seed=99)


@pytest.mark.parametrize("text", ["no json", '{"said": {"words": ["a"]}}', "[1]"])
def test_a_damaged_file(tmp_path, text) -> None:
    (tmp_path / canaries.FILE).write_text(text)
    with pytest.raises(ValueError, match="is not a file of canaries, or it is damaged"):
        canaries.load(tmp_path)


# -------------------------------------------------------------------- the audit of a run


def test_a_private_run_keeps_its_claim(folder, capsys, tmp_path) -> None:
    """Nothing is remembered after one epoch with noise; δ must be below 1/(2 x 20)."""
    assert audit(["run", "--run", str(folder), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "20 canaries" in shown
    assert "claim: epsilon" in shown
    assert "verdict: the claim stands" in shown
    assert json.loads((tmp_path / "found.json").read_text())["epsilon"] < 3


def test_a_run_that_remembers_more_than_its_card_says(folder, monkeypatch, capsys, tmp_path) -> None:
    """The scores of a model that knows all its canaries by heart, against a card with ε = 0.1."""
    copied = shutil.copytree(folder, tmp_path / "run")
    card = json.loads((copied / "privacy_card.json").read_text())
    (copied / "privacy_card.json").write_text(json.dumps({**card, "epsilon": 0.1}))
    inside = np.arange(200) % 2 == 0
    monkeypatch.setattr(seen, "scores", lambda folder: (np.where(inside, 0.0, -9.0), inside))
    assert audit(["run", "--run", str(copied)]) == 1
    shown = capsys.readouterr().out
    assert "100 of 100 guesses were right" in shown
    assert "REFUTED" in shown


def test_a_plain_run_claims_nothing(tmp_path, capsys) -> None:
    run(tiny(tmp_path / "run", canaries=20, epochs=1, private="off"))
    assert audit(["run", "--run", str(tmp_path / "run"), "--delta", "1e-5"]) == 0
    assert "claim: none, the run is not private" in capsys.readouterr().out


def test_a_run_without_canaries(tmp_path, capsys) -> None:
    run(tiny(tmp_path / "run", epochs=1, private="off"))
    assert audit(["run", "--run", str(tmp_path / "run")]) == 2
    assert "train with --canaries" in capsys.readouterr().err
