"""An attack from the run folder to the report: who is a candidate, which shadows are trained, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from mia import shadows
from mia.attack import ATTACKS, Attacker, main
from mia.candidates import candidates, open_run
from mia.classifiers import CLASSIFIERS, membership
from mia.metrics import evaluate
from models.bert import BERT
from tasks.nlu.corpus import Corpus, Utterance
from tasks.nlu.dataset import Data, read
from tasks.nlu.labels import Labels
from tasks.nlu.splits import Split, forms
from tests.helpers.jobs import run, tiny, tiny_encoder

LABELS = Labels.of_slots(["call", "stop"], ["name"])


def rows(train: list[int], test: list[int]) -> Split:
    return Split(np.array(train, np.int64), np.array([], np.int64), np.array(test, np.int64))


def call(*words: str, slot: str = "name", intent: str = "call") -> Utterance:
    return Utterance((*words, "x"), ("O",) * len(words) + (f"B-{slot}",), intent)


# -------------------------------------------------------------------- candidates


def test_near_duplicates_and_unknown_labels_are_left_out_on_both_sides() -> None:
    members = [call("ring"), call("phone"), call("dial", "7"), call("end"), call("hold")]
    others = [call("RING"), call("dial", "3"), call("halt", slot="place"), call("quit", intent="leave"), call("go")]
    found = candidates(Data(Corpus(members + others), rows([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]), ()), LABELS)
    assert found.rows.tolist() == [1, 3, 4, 9]
    assert found.members.tolist() == [True, True, True, False]
    assert (found.near_duplicates, found.unknown_labels) == (4, 2)


def test_equal_words_with_other_labels_are_left_out() -> None:
    said = [call("ring"), call("end"), Utterance(("ring", "x"), ("O", "O"), "stop"), call("go")]
    found = candidates(Data(Corpus(said), rows([0, 1], [2, 3]), ()), LABELS)
    assert found.rows.tolist() == [1, 3]


def test_as_many_members_as_non_members_are_drawn() -> None:
    """The form of an utterance is its words here: none is left out."""
    corpus = Corpus(call(f"word{chr(97 + number)}") for number in range(26))
    found = candidates(Data(corpus, rows(list(range(6)), list(range(6, 26))), ()), LABELS, seed=3)
    assert found.members.sum() == (~found.members).sum() == 6
    assert set(found.rows[found.members]) == set(range(6))
    assert set(found.rows[~found.members]) <= set(range(6, 26))
    again = candidates(Data(corpus, rows(list(range(6)), list(range(6, 26))), ()), LABELS, seed=4)
    assert again.rows.tolist() != found.rows.tolist()


def test_no_held_out_data() -> None:
    with pytest.raises(ValueError, match="there are 1 members and 0 held-out utterances: an attack needs both"):
        candidates(Data(Corpus([call("ring")]), rows([0], []), ()), LABELS)


def test_nothing_left() -> None:
    said = Data(Corpus([call("ring"), call("ring")]), rows([0], [1]), ())
    with pytest.raises(ValueError, match="none are left on one side: 2 are near duplicates of each other, 0 have"):
        candidates(said, LABELS)


# -------------------------------------------------------------------- the classifier


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_what_the_shadow_taught(classifier) -> None:
    """Members have a higher first feature, in the shadow as in the target; the second says nothing."""
    draw = np.random.default_rng(0)
    members = np.arange(2000) % 2 == 0
    known, target = draw.normal(size=(2, 2000, 2)) + np.stack([3.0 * members, np.zeros(2000)], axis=1)
    assert roc_auc_score(members, membership(known, members, target, classifier)) > 0.97  # 0.983 is the best


def test_a_shadow_without_members() -> None:
    with pytest.raises(ValueError, match="must have members and non-members: got 3 flags, 0 of them members, for 3"):
        membership(np.ones((3, 2)), np.zeros(3, bool), np.ones((1, 2)))


def test_features_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"got the shapes \(3, 2\) and \(1, 4\)"):
        membership(np.ones((3, 2)), np.array([True, False, True]), np.ones((1, 4)))


def test_an_unknown_classifier() -> None:
    with pytest.raises(ValueError, match="classifier must be one of boosting, logistic, mlp, got 'forest'"):
        membership(np.ones((2, 1)), np.array([True, False]), np.ones((1, 1)), "forest")


# -------------------------------------------------------------------- the whole way


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("attack") / "target"
    run(tiny(folder, private="off", examples=160))
    return str(folder)


def test_all_attacks(target, tmp_path, capsys, monkeypatch) -> None:
    """Shadows are trained once; the table, the JSON and the plot are there."""
    trained, real = [], shadows._train

    def train(config, threads) -> None:
        trained.append(config)  # one of them in a process of its own, as all are in earnest
        real(config, threads) if config.output.endswith("generated") else run(config)

    monkeypatch.setattr(shadows, "_train", train)
    flags = ["--run", target, "--output", str(tmp_path / "task"), "--shadows", "5"]
    for _ in range(2):
        main([*flags, "--attack", *ATTACKS, "--shadow-task", "generated", "--classifier", "logistic"])
    assert len(trained) == 6  # five for LiRA and RMIA, one for the attack of the paper
    assert not (tmp_path / "task" / "shadow-generated" / "checkpoints").exists()
    report = json.loads((tmp_path / "task" / "report.json").read_text())
    known = report["attacks"]
    assert known.keys() == set(ATTACKS)
    assert known["lira"]["members"] == known["rmia"]["members"] <= known["loss"]["members"]
    assert (tmp_path / "task" / "roc.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ATTACKS)


def test_shadows_are_like_the_target_on_other_rows(target, tmp_path) -> None:
    attacked = open_run(target)
    first, second = shadows.like_target(replace(attacked, workers=2), tmp_path, 2)
    assert first.batch_size == 2 * attacked.config.batch_size
    assert (first.epochs, first.hidden, first.private) == (2, 4, "off")
    inside = shadows.insides([first, second], attacked.data.corpus, np.arange(160))
    assert ((inside.mean(axis=1) > 0.3) & (inside.mean(axis=1) < 0.6)).all()
    assert (inside[0] != inside[1]).any()
    labels = json.loads((tmp_path / "labels.json").read_text())
    assert set(labels["intents"]) == set(attacked.data.corpus.intents)


def test_a_shadow_on_other_data(target, tmp_path) -> None:
    """Never on the target's own, whose members it would know."""
    attacked = open_run(target)
    config = shadows.on_task(attacked, tmp_path, "generated", None)
    assert not set(read(config)) & {attacked.data.corpus[row] for row in attacked.data.rows.train}
    attacked = replace(attacked, config=replace(attacked.config, task="snips", data="somewhere"))
    with pytest.raises(ValueError, match="the shadow's task must be another than the target's, which is snips too"):
        shadows.on_task(attacked, tmp_path, "snips", "somewhere")
    assert shadows.on_task(attacked, tmp_path, "atis", "there").task == "atis"


def test_a_shadow_does_not_teach_of_the_targets_utterances(target, tmp_path, monkeypatch) -> None:
    """Equal ones may be in both corpora; only the others are learned from."""
    attacked = open_run(target)
    attacker, learned = Attacker(attacked, tmp_path), []
    own = {utterance.words for utterance in attacked.data.corpus}
    train, test = attacked.data.rows.train[:3], attacked.data.rows.test[:3]
    said = [attacked.data.corpus[row] for row in [*train, *test]]
    fresh = [replace(one, words=(f"new{number}", *one.words[1:])) for number, one in enumerate(said)]
    mixed = Data(
        Corpus(said[:3] + fresh[:3] + said[3:] + fresh[3:]), rows([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]), ()
    )
    monkeypatch.setattr(attacker, "_view", lambda parts, run, some: learned.extend(some) or attacker._seen)
    monkeypatch.setattr("mia.attack.membership", lambda features, members, *_: members)
    attacker.shadow(replace(attacked, data=mixed))
    assert learned
    assert not {mixed.corpus[row].words for row in learned} & own


def test_a_private_target_has_private_shadows(tmp_path) -> None:
    """The micro-batches of two workers become those of one."""
    run(tiny(tmp_path / "run", epochs=1))
    attacked = replace(open_run(tmp_path / "run"), workers=2)
    [config] = shadows.like_target(attacked, tmp_path / "mia", 1)
    assert (config.private, config.noise_multiplier, config.micro_batches, config.batch_size) == ("edp", 1.0, 2, 12)
    assert config.seed is None


def test_a_shadow_that_was_interrupted_goes_on(target, tmp_path, monkeypatch) -> None:
    [config] = shadows.like_target(open_run(target), tmp_path, 1)
    run(config)
    folder = tmp_path / "shadow-000"
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("")  # as if it had been killed before its end
    commands = []
    monkeypatch.setattr(shadows.subprocess, "run", lambda command, **_: commands.append(command) or Ended(0))
    shadows.train_all([config])
    assert commands[0][3:5] == ["--resume", str(folder)]
    (folder / "metrics.jsonl").write_text(lines)
    shadows.train_all([config])
    assert len(commands) == 1


def test_kept_states_are_read_instead_of_the_encoder(tmp_path, monkeypatch) -> None:
    """By the target and its shadows, in training and under attack: scores are those of the encoder itself."""
    heads = {"model": "bert", "freeze": "encoder", "private": "off", "head_learning_rate": 0.05}
    heads |= {"pretrained": tiny_encoder(tmp_path / "encoder"), "dropout": 0.0}
    run(tiny(tmp_path / "first", **heads, keep_features=True))
    run(tiny(tmp_path / "target", **heads, states_from=str(tmp_path / "first")))
    attacked = open_run(tmp_path / "target")
    monkeypatch.setattr(shadows, "_train", lambda config, threads: run(config))
    with monkeypatch.context() as patch:
        patch.setattr(BERT, "states", None)  # whoever ran the encoder would fail
        attacker = Attacker(attacked, tmp_path / "kept")
        found = attacker.loss(), attacker.with_shadows("lira", 5)
        trained = open_run(tmp_path / "kept" / "shadow-000").config
        assert (trained.states_from, trained.keep_features) == (str(tmp_path / "first"), False)
    attacker = Attacker(replace(attacked, config=replace(attacked.config, states_from=None)), tmp_path / "kept")
    for file in (tmp_path / "kept").glob("*/view-*.npz"):
        file.unlink()
    expected = attacker.loss(), attacker.with_shadows("lira", 5)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found[1], expected[1], rtol=5e-2, atol=5e-2)
    assert np.ptp(expected[0]) > 0.1


@pytest.mark.parametrize("change", [{"canaries": 5}, {"freeze": "none"}])
def test_shadows_without_use_for_the_kept_states(tmp_path, change) -> None:
    """Those of other utterances or of another encoder."""
    heads = {"model": "bert", "freeze": "encoder", "private": "off", "pretrained": tiny_encoder(tmp_path / "encoder")}
    run(tiny(tmp_path / "target", **heads, epochs=1, keep_features=True))
    attacked = open_run(tmp_path / "target")
    [config] = shadows.like_target(attacked, tmp_path, 1)
    assert config.states_from == str(tmp_path / "target")
    attacked = replace(attacked, config=replace(attacked.config, **change))
    [config] = shadows.like_target(attacked, tmp_path, 1)
    assert (config.states_from, config.keep_features) == (None, False)
    attacked = replace(attacked, config=replace(attacked.config, states_from=str(tmp_path / "target")))
    assert shadows.on_task(attacked, tmp_path, "snips", "somewhere").states_from is None


class Ended:
    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


def test_a_shadow_that_fails(target, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shadows.subprocess, "run", lambda *_, **__: Ended(3))
    with pytest.raises(ValueError, match=r"ended with status 3: see .*shadow-000/log\.txt"):
        shadows.train_all(shadows.like_target(open_run(target), tmp_path, 2))


def test_shadows_of_other_settings_are_refused(target, tmp_path) -> None:
    [config] = shadows.like_target(open_run(target), tmp_path, 1)
    run(config)
    with pytest.raises(ValueError, match=r"holds a shadow with other settings \(epochs\): delete it"):
        shadows.train_all([replace(config, epochs=3)])


def failure(*arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return str(ended.value.code)


def test_bad_input(target, tmp_path, capsys) -> None:
    here = ("--output", str(tmp_path / "mia"))
    assert failure("--run", target, "--attack", "shadow") == "2"
    assert "the attack shadow needs --shadow RUN" in capsys.readouterr().err
    assert "is not a run folder" in failure("--run", str(tmp_path))
    assert "at least 2 shadows and 1 job, got 8 and 0" in failure(
        "--run", target, *here, "--attack", "lira", "--jobs", "0"
    )
    assert "at least 2 shadows and 1 job, got 1 and 1" in failure(
        "--run", target, *here, "--attack", "rmia", "--shadows", "1"
    )
    itself = failure("--run", target, *here, "--attack", "shadow", "--shadow", target)
    assert "are in the target's corpus too: it must be trained on other data" in itself


@pytest.mark.parametrize("number", [0, 20])
def test_insides_are_what_shadows_train_on(tmp_path, number) -> None:
    """Canaries of the target and equal utterances included."""
    run(tiny(tmp_path / "target", epochs=1, private="off", canaries=number))
    attacked = open_run(tmp_path / "target")
    [config] = shadows.like_target(attacked, tmp_path, 1)
    run(replace(config, epochs=1))
    trained = open_run(config.output).data
    inside = shadows.insides([config], attacked.data.corpus, np.arange(120))[0]
    assert [attacked.data.corpus[row] for row in np.flatnonzero(inside)] == [
        trained.corpus[r] for r in trained.rows.train
    ]


def test_a_model_that_knows_its_utterances_is_found_out(tmp_path, monkeypatch) -> None:
    """And one that never saw them is not: 0.5 is in the interval."""
    monkeypatch.setattr(shadows, "_train", lambda config, threads: run(config))
    sizes = {"hidden": 64, "dimension": 64, "epochs": 10, "batch_size": 3, "learning_rate": 0.02, "dropout": 0.0}
    for name, seed in (("known", 0), ("strange", 1)):
        settings = {**sizes, "schedule": "constant", "warmup": 0.0, "data_seed": seed, "seed": seed}
        run(tiny(tmp_path / name, private="off", **settings))
    known = open_run(tmp_path / "known")
    strange = replace(known, parts=open_run(tmp_path / "strange").parts)
    for target, is_known in ((known, True), (strange, False)):
        attacker = Attacker(target, tmp_path / "mia")
        for name in ("loss", "lira", "rmia"):
            scores = attacker.loss() if name == "loss" else attacker.with_shadows(name, 5)
            judged = ~np.isnan(scores)
            found = evaluate(scores[judged], attacker.about.members[judged], confidence=0.99).auc
            assert found.low > 0.55 if is_known else found.low < 0.5 < found.high, name


def test_a_run_whose_data_have_changed(tmp_path) -> None:
    run(tiny(tmp_path, private="off", epochs=1))
    settings = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(settings.replace("examples: 120", "examples: 121"))
    with pytest.raises(ValueError, match="the data are not those of the run"):
        open_run(tmp_path)


def test_a_training_that_has_not_ended(tmp_path) -> None:
    run(tiny(tmp_path, private="off", epochs=1))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has not ended: go on with tasks.train --resume"):
        open_run(tmp_path)


def test_forms_are_equal_for_near_duplicates() -> None:
    found = forms(Corpus([call("Ring", "7"), call("ring", "4"), call("ring"), call("ring", "7", slot="place")]))
    assert found[0] == found[1]
    assert len(set(found.tolist())) == 3
