"""The demo: its settings hold what it promises, and in small it runs as it does in full."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields, replace

import pytest

from tasks import demo
from tasks.nlu import dataset, recipes
from tasks.nlu.configuration import Config
from tasks.nlu.dataset import Data
from tests.helpers.jobs import metrics, tiny_encoder
from tests.helpers.paths import ROOT
from tests.helpers.small_demo import SMALL
from tests.test_launchers import command, environment

WORKERS = 2  # of make demo


@pytest.fixture(scope="module")
def data() -> Data:
    return dataset.load(demo.PRIVATE, None, seed=0)


def test_no_toy(data) -> None:
    """At least 5,000 utterances to train on, 7 intents and 30 slots, all of which occur."""
    said = [data.corpus[row] for row in data.rows.train]
    assert len(said) >= 5_000
    assert len({one.intent for one in said}) >= 7
    assert len({kind for one in said for kind, _, _ in one.slots()}) >= 30


def followed(data) -> Config:
    """The settings of the private job."""
    return recipes.follow(demo.PRIVATE, demo.CHOSEN, len(data.rows.train), WORKERS).config


def test_the_promise(data) -> None:
    """ε = 8 for single utterances, at a δ below one over their number, with labels that are public."""
    private = followed(data)
    assert (private.private, private.sampling, private.epsilon) == ("example", "poisson", 8.0)
    assert private.delta * len(data.rows.train) < 1
    assert (private.labels, private.seed) == ("grammar", None)


def test_both_jobs_have_the_same_data_and_model(data) -> None:
    private, plain = followed(data).given(), demo.PLAIN.given()
    groups = {item.name: item.metadata["group"] for item in fields(Config)}
    differing = {groups[name] for name, value in private.items() if plain[name] != value}
    assert differing == {"training", "privacy"}
    assert (plain["private"], plain["freeze"]) == ("off", "encoder")


def test_in_small(tmp_path) -> None:
    """Two Horovod workers: the sentence, the card, and what is left in the run folders."""
    here = {**environment(), "PYTHONPATH": str(ROOT)}
    arguments = ["-m", "tests.helpers.small_demo", tiny_encoder(tmp_path)]
    done = subprocess.run(
        command("horovodrun", 2, *arguments), cwd=tmp_path, env=here, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = re.sub(r"^\[0\]<stdout>:", "", done.stdout, flags=re.MULTILINE)
    assert "[1]<stdout>:" not in said
    plain, private = tmp_path / "runs" / "plain-2026-0", tmp_path / "runs" / "demo-2026-0"
    assert set((tmp_path / "runs").iterdir()) == {plain, private}

    without, found = (metrics(folder)[-1]["test_ser"] for folder in (plain, private))
    sentence = r"costs (\S+) points of SER: (\d+) errors in 1000 intents and slots\ninstead of (\d+), (\S+) times"
    [difference, errors, before, ratio] = map(float, re.findall(sentence, said)[0])
    assert difference == pytest.approx(found - without, abs=0.051)
    assert (errors, before) == pytest.approx((10 * found, 10 * without), abs=0.51)
    assert ratio == pytest.approx(found / without, abs=0.0051)
    assert metrics(private)[-1]["epsilon"] <= 8

    card = (private / "privacy_card.md").read_text(encoding="utf-8")
    assert card in said
    assert "encoder_states" not in card  # they are deleted
    assert "the label set: " not in card  # it is public
    assert not list((tmp_path / "runs").rglob("*.f16"))
    assert f'tasks.predict --run {private.relative_to(tmp_path)} --text "' in said
    heard = {" ".join(one.words) for one in dataset.read(replace(demo.PRIVATE, examples=SMALL["examples"]))}
    assert not any(text in said for text in heard)


def test_hidden_states_go_even_if_the_demo_is_stopped(tmp_path, monkeypatch) -> None:
    small = {**SMALL, "pretrained": tiny_encoder(tmp_path), "epochs": 1, "threads": 1}
    monkeypatch.setattr(demo, "PLAIN", replace(demo.PLAIN, **small))
    monkeypatch.setattr(demo, "CHOSEN", demo.CHOSEN | small.keys())
    monkeypatch.setattr(demo, "PRIVATE", replace(demo.PRIVATE, **{**small, "examples": 160}))  # other data
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="of other data"):
        demo.main()
    assert not list((tmp_path / "runs").rglob("*.f16"))
