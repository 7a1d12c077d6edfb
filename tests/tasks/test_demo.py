"""The demo: its settings hold what it promises, and in small it runs as it does in full."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tasks import demo
from tasks.nlu import dataset
from tasks.nlu.splits import Split
from tests.helpers.jobs import metrics, tiny_encoder

WORKERS = 2  # of make demo
SMALL = {"examples": 150, "bucket_size": 32, "tensorboard": False, "threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def rows() -> Split:
    return dataset.load(demo.PRIVATE, None, seed=0).rows


def test_no_toy() -> None:
    """At least 5,000 utterances to train on, 7 intents and 30 slots, all of which occur."""
    data = dataset.load(demo.PRIVATE, None, seed=0)
    said = [data.corpus[row] for row in data.rows.train]
    assert len(said) >= 5_000
    assert len({one.intent for one in said}) >= 7
    assert len({kind for one in said for kind, _, _ in one.slots()}) >= 30


def test_the_promise(rows) -> None:
    """ε = 8 for single utterances, at a δ below one over their number, with labels that are public."""
    private = demo.PRIVATE
    assert (private.private, private.sampling, private.epsilon) == ("example", "poisson", 8.0)
    assert private.delta * len(rows.train) < 1
    assert WORKERS * private.batch_size / len(rows.train) == pytest.approx(0.3, abs=0.01)
    assert (private.labels, private.seed) == ("grammar", None)


def test_both_jobs_have_the_same_data_and_model() -> None:
    private, plain = demo.PRIVATE.given(), demo.PLAIN.given()
    differing = {name for name, value in private.items() if plain[name] != value}
    of_training = {"optimizer", "head_learning_rate", "batch_size", "epochs"}
    assert differing == of_training | {"private", "epsilon", "delta", "sampling"}
    assert (plain["private"], plain["freeze"]) == ("off", "encoder")


def test_in_small(tmp_path, monkeypatch, capsys) -> None:
    encoder = tiny_encoder(tmp_path)
    small = {**SMALL, "pretrained": encoder, "epochs": 2, "batch_size": 30}
    monkeypatch.setattr(demo, "PRIVATE", replace(demo.PRIVATE, **small))
    monkeypatch.setattr(demo, "PLAIN", replace(demo.PLAIN, **small))
    monkeypatch.chdir(tmp_path)
    demo.main()
    said = capsys.readouterr().out
    [plain], [private] = (list((tmp_path / "runs").glob(f"{name}-*")) for name in ("plain", "demo"))
    without, found = (metrics(folder)[-1]["test_ser"] for folder in (plain, private))
    [difference, errors, before, ratio] = map(
        float,
        re.findall(
            r"ε = 8 costs (\S+) points of SER: (\d+) errors in 1000 intents and slots\ninstead of (\d+), (\S+) times",
            said,
        )[0],
    )
    assert difference == pytest.approx(found - without, abs=0.051)
    assert (errors, before) == pytest.approx((10 * found, 10 * without), abs=0.51)
    assert ratio == pytest.approx(found / without, abs=0.0051)
    assert not list((tmp_path / "runs").rglob("*.f16"))
    card = (private / "privacy_card.md").read_text(encoding="utf-8")
    assert card in said
    assert "encoder_states" not in card
    assert "the label set: " not in card
    assert f'tasks.predict --run {private.relative_to(tmp_path)} --text "' in said
    assert metrics(private)[-1]["epsilon"] <= 8
    heard = {" ".join(one.words) for one in dataset.read(demo.PRIVATE)}
    assert not any(text in said for text in heard)


def test_hidden_states_go_even_if_the_demo_is_stopped(tmp_path, monkeypatch) -> None:
    small = {**SMALL, "pretrained": tiny_encoder(tmp_path), "epochs": 1, "batch_size": 30}
    monkeypatch.setattr(demo, "PLAIN", replace(demo.PLAIN, **small))
    monkeypatch.setattr(demo, "PRIVATE", replace(demo.PRIVATE, **{**small, "examples": 160}))  # other data
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="of other data"):
        demo.main()
    assert not list((tmp_path / "runs").rglob("*.f16"))
