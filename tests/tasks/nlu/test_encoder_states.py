"""Hidden states that are computed once: equal to uncached ones, private, and never those of something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.common import checkpoints
from tasks.common.workers import workers
from tasks.nlu import encoder_states, generator, new_model, training_loop
from tasks.nlu.configuration import Config, parse
from tasks.nlu.corpus import Corpus, Rows, word_places
from tasks.nlu.encoder_states import FOLDER, KEPT, EncoderStates
from tasks.nlu.example_batches import Examples
from tasks.nlu.run_folder import Parts
from tests.helpers.jobs import assert_same_weights, here, run, tiny, tiny_encoder, weights
from tests.helpers.small_models import ENCODER
from tests.helpers.threads import run_workers

FROZEN = {"model": "bert", "freeze": "encoder", "transitions": "bio", "zero_heads": True, "dropout": 0.0}
IN_FILE = {"feature_memory": 0}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(generator.utterances(150, seed=4))


def settings(folder: Path, encoder: str, **more) -> Config:
    return tiny(folder, pretrained=encoder, **FROZEN, **more)


def parts_of(config: Config, corpus: Corpus) -> Parts:
    torch.manual_seed(0)
    return new_model.build(config, corpus, np.arange(len(corpus)))


def states_of(config: Config, parts: Parts, corpus: Corpus, folder: Path) -> EncoderStates:
    with workers("cpu", 1) as team:
        table = parts.inputs.table(corpus.words)
        return encoder_states.compute(config, team, folder, parts.model, corpus, table)


def examples(parts: Parts, corpus: Corpus, rows: Rows) -> Examples:
    return Examples(corpus, rows, parts.inputs.table(corpus.words), parts.labels)


@pytest.mark.parametrize("more", [{}, IN_FILE, {"features": "last"}], ids=["memory", "file", "last layer"])
def test_features_from_kept_states_are_those_of_the_encoder(tmp_path, encoder, corpus, more) -> None:
    config = settings(tmp_path / "run", encoder, **more)
    parts = parts_of(config, corpus)
    states = states_of(config, parts, corpus, tmp_path / "run")
    assert (states.file is not None) == ("feature_memory" in more)
    rows = np.array([3, 149, 0, 77, 20])
    plain, kept = examples(parts, corpus, rows), examples(parts, corpus, rows)
    kept.states = states
    chosen = [4, 1, 1, 0]
    for name in ("mask", "tags", "intents"):
        assert torch.equal(kept.batch(chosen)[name], plain.batch(chosen)[name])
    assert "pieces" not in kept.batch(chosen)
    mask = plain.batch(chosen)["mask"]
    found, expected = parts.model.features(kept.batch(chosen)), parts.model.features(plain.batch(chosen))
    torch.testing.assert_close(found[0][mask], expected[0][mask], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3)


def test_memory_and_file_give_the_same_weights_and_no_file_stays(tmp_path, encoder) -> None:
    common = {"private": "example", "sampling": "poisson", "seed": 3}
    run(settings(tmp_path / "memory", encoder, **common))
    run(settings(tmp_path / "file", encoder, **common, **IN_FILE))
    kept = run(settings(tmp_path / "kept", encoder, **common, **IN_FILE, keep_features=True))
    assert_same_weights(tmp_path / "memory", tmp_path / "file")
    assert_same_weights(tmp_path / "memory", tmp_path / "kept")
    assert not any((tmp_path / name / FOLDER).exists() for name in ("memory", "file"))
    folder = tmp_path / "kept" / FOLDER
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "states.f16": 0o600,
        "about.json": 0o600,
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    assert KEPT in kept.card.markdown()


def test_states_of_an_utterance_do_not_depend_on_the_others(tmp_path) -> None:
    """Bit for bit: with one utterance less, all others have the same states. In batches, this encoder moves them."""
    said = list(generator.utterances(150, seed=4))
    whole, less = Corpus(said), Corpus(said[:40] + said[41:])
    config = settings(tmp_path / "run", str(ENCODER))
    parts = parts_of(config, whole)
    with_it = states_of(config, parts, whole, tmp_path / "whole")
    without = states_of(config, parts, less, tmp_path / "less")
    kept = np.array([row for row in range(150) if row != 40])
    assert np.array_equal(with_it.utterances[kept], without.utterances)
    assert np.array_equal(with_it.words[word_places(whole, kept)], without.words)


@pytest.mark.parametrize("more", [{}, IN_FILE], ids=["memory", "file"])
def test_workers_compute_a_share_each_and_have_all(tmp_path, encoder, corpus, more) -> None:
    config = settings(tmp_path / "run", encoder, **more)
    parts = parts_of(config, corpus)
    table = parts.inputs.table(corpus.words)
    alone = states_of(config, parts, corpus, tmp_path / "alone")

    def compute(collective) -> EncoderStates:
        team = here("horovod", collective)
        return encoder_states.compute(config, team, tmp_path / "shared", parts.model, corpus, table)

    for states in run_workers(3, compute):
        assert np.array_equal(states.words, alone.words)
        assert np.array_equal(states.utterances, alone.utterances)


def test_the_encoder_reads_every_utterance_once(tmp_path, encoder, monkeypatch) -> None:
    """Whatever the number of epochs."""
    read: list[int] = []
    of_utterance = encoder_states._of_utterance

    def counted(row: int, *more):
        read.append(row)
        return of_utterance(row, *more)

    monkeypatch.setattr(encoder_states, "_of_utterance", counted)
    run(settings(tmp_path / "run", encoder, private="off", epochs=4))
    assert sorted(read) == list(range(120))


def test_a_resumed_run_equals_one_that_nobody_interrupted(tmp_path, encoder, monkeypatch) -> None:
    """The states of a file are taken as they are; those in memory are computed again."""
    take = training_loop.Training._step

    def stops(self, *arguments) -> None:
        if self.state.step == 7:
            raise KeyboardInterrupt
        take(self, *arguments)

    for name, more in {"memory": {}, "file": IN_FILE}.items():
        common = {"private": "off", "seed": 5, "checkpoint_every": 2, "epochs": 3, **more}
        whole, halted = tmp_path / f"whole-{name}", tmp_path / f"halted-{name}"
        run(settings(whole, encoder, **common))
        with monkeypatch.context() as patch:
            patch.setattr(training_loop.Training, "_step", stops)
            with pytest.raises(KeyboardInterrupt):
                run(settings(halted, encoder, **common))
        assert (halted / FOLDER).exists() == (name == "file")
        assert checkpoints.last_step(halted / "checkpoints") == 6
        with monkeypatch.context() as patch:
            if name == "file":
                patch.setattr(encoder_states, "_fill", None)  # they are there
            run(parse(["--resume", str(halted)])[0], resume=halted)
        assert_same_weights(whole, halted)
        assert not (halted / FOLDER).exists()


def test_states_of_something_else_are_refused(tmp_path, encoder, corpus) -> None:
    config = settings(tmp_path / "run", encoder, **IN_FILE)
    parts = parts_of(config, corpus)
    folder = tmp_path / "run"
    states_of(config, parts, corpus, folder)
    states_of(config, parts, corpus, folder)  # the same ones are taken
    other = Corpus(generator.utterances(150, seed=5))
    with pytest.raises(ValueError, match="another encoder or of other data: delete it"):
        states_of(config, parts, other, folder)
    with torch.no_grad():
        next(parts.model.encoder.parameters()).view(-1)[0] += 1e-3
    with pytest.raises(ValueError, match="another encoder or of other data: delete it"):
        states_of(config, parts, corpus, folder)
    (folder / FOLDER / "about.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is damaged, delete it"):
        states_of(config, parts, corpus, folder)


def test_another_run_begins_with_states_that_were_kept(tmp_path, encoder, monkeypatch) -> None:
    common = {"private": "example", "sampling": "poisson", "seed": 3}
    run(settings(tmp_path / "first", encoder, **common, keep_features=True))
    again = settings(tmp_path / "again", encoder, **common, states_from=str(tmp_path / "first"))
    with monkeypatch.context() as patch:
        patch.setattr(encoder_states, "_fill", None)  # they are there
        run(again)
    assert_same_weights(tmp_path / "first", tmp_path / "again")
    assert (tmp_path / "first" / FOLDER / "states.f16").exists()
    assert not (tmp_path / "again" / FOLDER).exists()


def test_kept_states_are_opened_for_their_encoder_and_data_alone(tmp_path, encoder, corpus) -> None:
    config = settings(tmp_path / "run", encoder, **IN_FILE)
    folder = tmp_path / "run"
    parts = parts_of(config, corpus)
    assert encoder_states.kept_by(folder, config) is None
    expected = states_of(config, parts, corpus, folder)
    assert encoder_states.kept_by(folder, config) == folder
    assert encoder_states.kept_by(tmp_path, settings(tmp_path, encoder, states_from=str(folder))) == folder
    found = encoder_states.open_kept(folder, parts.model, corpus)
    assert np.array_equal(found.words, expected.words)
    assert np.array_equal(found.utterances, expected.utterances)
    with pytest.raises(ValueError, match="read-only"):
        found.words[:] = 0.0
    assert encoder_states.open_kept(folder, parts.model, Corpus(generator.utterances(150, seed=5))) is None
    with torch.no_grad():
        next(parts.model.encoder.parameters()).view(-1)[0] += 1e-3
    assert encoder_states.open_kept(folder, parts.model, corpus) is None


def test_states_of_another_run_that_do_not_fit_are_refused(tmp_path, encoder, corpus) -> None:
    config = settings(tmp_path / "run", encoder, states_from=str(tmp_path / "other"))
    parts = parts_of(config, corpus)
    with pytest.raises(ValueError, match="holds no hidden states: --keep-features keeps"):
        states_of(config, parts, corpus, tmp_path / "run")
    states_of(settings(tmp_path / "other", encoder, **IN_FILE), parts, corpus, tmp_path / "other")
    other = Corpus(generator.utterances(150, seed=5))
    with pytest.raises(ValueError, match="or of other data: leave out --states-from"):
        states_of(config, parts, other, tmp_path / "run")
    assert (tmp_path / "other" / FOLDER / "states.f16").exists()


def test_a_file_that_was_not_finished_is_made_again(tmp_path, encoder, corpus) -> None:
    config = settings(tmp_path / "run", encoder, **IN_FILE)
    parts, folder = parts_of(config, corpus), tmp_path / "run"
    expected = np.array(states_of(config, parts, corpus, folder).words)
    (folder / FOLDER / "about.json").unlink()
    (folder / FOLDER / "states.f16").write_bytes(b"half")
    assert np.array_equal(states_of(config, parts, corpus, folder).words, expected)


def test_a_disk_that_is_too_full_is_refused_before_the_first_utterance(tmp_path, encoder, corpus, monkeypatch) -> None:
    config = settings(tmp_path / "run", encoder, **IN_FILE)
    parts = parts_of(config, corpus)
    free = shutil.disk_usage(tmp_path)._replace(free=2**26)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(encoder_states, "_fill", None)
    with pytest.raises(ValueError, match="GB free: choose fewer layers"):
        states_of(config, parts, corpus, tmp_path / "run")


def test_states_beyond_half_precision_are_refused(tmp_path, encoder, corpus) -> None:
    config = settings(tmp_path / "run", encoder, features="layers:1")
    parts = parts_of(config, corpus)
    norm = parts.model.encoder.encoder.layer[-1].output.LayerNorm
    with torch.no_grad():
        norm.bias.fill_(1e6)
    with pytest.raises(ValueError, match="do not fit half precision"):
        states_of(config, parts, corpus, tmp_path / "run")


def test_frozen_weights_are_those_of_the_encoder(tmp_path, encoder) -> None:
    """Nothing but the heads moves."""
    config = settings(tmp_path / "run", encoder, private="off", optimizer="sgd", head_learning_rate=0.1)
    run(config)
    before = parts_of(config, Corpus(generator.utterances(150, seed=4))).model.encoder.state_dict()
    after = weights(tmp_path / "run")
    assert all(torch.equal(after[f"encoder.{name}"], tensor) for name, tensor in before.items())
    assert after["slots.weight"].abs().max() > 0
    assert float(after["crf.transitions"].min()) == -1e4
