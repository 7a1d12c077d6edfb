"""Canaries: random, in or out by a coin, trained on only if they are in, and found again in the run folder."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mia import bounds, one_run
from mia.audit import main as audit
from mia.candidates import candidates, open_run
from mia.one_run import canary_scores
from tasks.nlu import canaries
from tasks.nlu.dataset import load
from tasks.nlu.generator import words
from tasks.nlu.labels import Labels
from tasks.nlu.training_step import StepLosses
from tests.helpers.jobs import run, tiny

LABELS = Labels.of_slots(["call", "stop", "play"], ["name", "place"])


def make(number: int, seed: int) -> list[canaries.Canary]:
    return canaries.make(number, LABELS, seed)


def test_half_of_them_are_in_and_no_two_are_alike() -> None:
    """Four standard deviations of a fair coin are 63 of 1000."""
    found = make(1000, seed=5)
    assert abs(sum(one.inside for one in found) - 500) < 63
    said = [one.said for one in found]
    assert len(set(said)) == 1000
    assert {word for one in said for word in one.words} <= set(words())
    assert {one.intent for one in said} == set(LABELS.intents)
    assert {tag for one in said for tag in one.tags} == {"O", "B-name", "B-place"}


def test_another_seed_other_canaries_and_coins() -> None:
    first, again, other = make(50, 1), make(50, 1), make(50, 2)
    assert first == again
    assert not {one.said for one in first} & {one.said for one in other}
    assert [one.inside for one in first] != [one.inside for one in other]


@pytest.mark.parametrize("private", ["off", "edp", "example"])
@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_no_loss_is_computed_of_blanks(tmp_path, monkeypatch, private, sampling) -> None:
    """Every other utterance is looked at, and the ledger has the same steps."""
    seen = []
    for name in ("mean_loss", "losses_by_bucket"):
        real = getattr(StepLosses, name)

        def spy(self, train, rows, *more, real=real):
            seen.extend(rows)
            return real(self, train, rows, *more)

        monkeypatch.setattr(StepLosses, name, spy)
    config = tiny(tmp_path / "run", canaries=20, epochs=1, private=private, sampling=sampling, batch_size=4, seed=1)
    run(config)
    data = load(config, tmp_path / "run", seed=0)
    assert not set(seen) & data.blanks()
    if sampling == "shuffled" or private == "off":
        assert set(seen) == set(range(len(data.rows.train))) - data.blanks()


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
    scores, inside = canary_scores(folder)
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


def test_vocabulary_and_labels_are_those_of_the_data(tmp_path) -> None:
    """A word list with the words of canaries would tell which were in, whatever the noise."""
    for number in (0, 20):
        run(tiny(tmp_path / str(number), canaries=number, epochs=1, private="off", vocabulary="training-set"))
    lists = [sorted(file.read_bytes() for file in (tmp_path / n / "vocabulary").iterdir()) for n in ("0", "20")]
    assert lists[0] == lists[1]


# -------------------------------------------------------------------- the audit of a run


def test_a_model_that_remembers_is_found_out(tmp_path, capsys) -> None:
    """Trained until it knows its canaries by heart; with the coins turned round nothing is found."""
    config = tiny(
        tmp_path / "run", examples=60, canaries=60, private="off", epochs=40, hidden=32, dimension=16, layers=1,
        dropout=0.0, learning_rate=0.02, seed=0,
    )  # fmt: skip
    run(config)
    scores, inside = canary_scores(tmp_path / "run")
    guesses, right = bounds.count_guesses(scores, inside, 15)
    assert right >= 27
    assert bounds.one_run_epsilon(60, guesses, right, 1e-5) > 1.0
    assert bounds.one_run_epsilon(60, *bounds.count_guesses(scores, ~inside, 15), 1e-5) == 0.0
    assert audit(["run", "--run", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "claim: none, the run is not private" in shown
    assert "verdict" not in shown


def test_a_private_run_beside_its_claim(folder, capsys, tmp_path) -> None:
    assert audit(["run", "--run", str(folder), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    card = json.loads((folder / "privacy_card.json").read_text())
    terms = "; on condition: ".join([card["neighbours"], *card["conditions"]])
    assert f"claim: epsilon {card['epsilon']:.6g} at delta 0.0005 ({terms})" in shown
    assert "verdict: the claim stands" in shown
    assert json.loads((tmp_path / "found.json").read_text())["claimed"] == card["epsilon"]


def test_a_run_that_remembers_more_than_its_card_says(folder, monkeypatch, capsys, tmp_path) -> None:
    """The scores of a model that knows all its canaries by heart, against a card with ε = 0.1."""
    copied = shutil.copytree(folder, tmp_path / "run")
    card = json.loads((copied / "privacy_card.json").read_text())
    (copied / "privacy_card.json").write_text(json.dumps({**card, "epsilon": 0.1}))
    inside = np.arange(200) % 2 == 0
    monkeypatch.setattr(one_run, "canary_scores", lambda folder: (np.where(inside, 0.0, -9.0), inside))
    assert audit(["run", "--run", str(copied)]) == 1
    shown = capsys.readouterr().out
    assert "100 of 100 guesses were right" in shown
    assert "REFUTED" in shown


def test_what_cannot_be_audited(folder, capsys, tmp_path) -> None:
    copied = shutil.copytree(folder, tmp_path / "run")
    assert audit(["run", "--run", str(copied), "--delta", "1e-9"]) == 2
    assert "delta must be that of the card, 0.0005" in capsys.readouterr().err
    (copied / "privacy_card.json").unlink()
    assert audit(["run", "--run", str(copied)]) == 2
    assert "is not a privacy card" in capsys.readouterr().err
    (copied / canaries.FILE).unlink()
    assert audit(["run", "--run", str(copied)]) == 2
    assert "train with --canaries" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"canaries must be at most 1/\(2δ\)"):
        tiny(tmp_path, canaries=1001)
