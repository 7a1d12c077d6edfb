"""Users of files and plays, and data that are refused."""

from __future__ import annotations

import pytest

from tasks import language_model
from tasks.language.configuration import Config
from tasks.language.dataset import has_private_dictionary
from tasks.language.readers import write_jsonl
from tasks.language.run_folder import load_model
from tasks.language.user_generator import generate
from tests.helpers.corpora import data_folder
from tests.helpers.jobs import metrics
from tests.helpers.language_jobs import SMALL, train


def test_files_of_users(tmp_path, capsys) -> None:
    write_jsonl(tmp_path / "users.jsonl", generate(40, seed=2, sentences=4, words=30))
    flags = ["--task", "jsonl", "--data", str(tmp_path / "users.jsonl"), "--cohort", "5", "--rounds", "2"]
    small = ["--hidden", "4", "--dimension", "4", "--no-tensorboard", "--clip-norm", "1", "--noise-multiplier", "2"]
    train(tmp_path / "run", *flags, *small, "--dictionary", "training-set", "--dictionary-size", "10", "--iid")
    assert len(load_model(tmp_path / "run")[1]) == 13
    page = (tmp_path / "run" / "privacy_card.md").read_text(encoding="utf-8")
    assert "the dictionary: it was read from the private texts" in page
    assert "users are made up, with sentences of many (--iid)" in page
    (tmp_path / "public.txt").write_text("A public text.\nPublic words.\n", encoding="utf-8")
    train(tmp_path / "other", *flags, *small, "--dictionary", f"text:{tmp_path / 'public.txt'}")
    assert load_model(tmp_path / "other")[1].words[:2] == [".", "public"]
    page = (tmp_path / "other" / "privacy_card.md").read_text(encoding="utf-8")
    assert "the dictionary: it was read" not in page
    assert "made up" not in page
    for dictionary, is_private in ((f"text:{tmp_path}/users.jsonl", True), (f"text:{tmp_path}/public.txt", False)):
        config = Config(task="jsonl", data=str(tmp_path / "users.jsonl"), dictionary=dictionary)
        assert has_private_dictionary(config) == is_private
    assert has_private_dictionary(Config(task="jsonl", data=str(tmp_path), dictionary=f"text:{tmp_path}/public.txt"))
    write_jsonl(tmp_path / "test.jsonl", generate(3, seed=9, sentences=4, words=30))
    listed = [*flags, "--dictionary", str(tmp_path / "run" / "dictionary.txt"), "--dry-run"]
    language_model.main([*listed, "--test-data", str(tmp_path / "test.jsonl")])
    assert "40 training users" in capsys.readouterr().out
    language_model.main(listed)
    assert "no noise, no promise" in capsys.readouterr().out


def test_speakers_are_users(tmp_path) -> None:
    plays = data_folder() / "shakespeare"
    flags = ["--task", "shakespeare", "--data", str(plays), "--dictionary", f"text:{plays / 'input.txt'}"]
    small = ["--dictionary-size", "200", "--hidden", "4", "--dimension", "4", "--budget", "40", "--no-tensorboard"]
    train(tmp_path / "run", *flags, *small, "--cohort", "4", "--rounds", "1")
    assert metrics(tmp_path / "run")[-1]["test_words"] > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cohort", "1000"], "at most the number of training users"),
        (["--cohort", "2.5", "--sampling", "fixed"], "a whole number"),
        (["--users", "1", "--cohort", "1"], "users have no words"),
        (["--task", "jsonl", "--data", "nowhere.jsonl", "--dictionary", "training-set"], "nowhere.jsonl"),
    ],
)
def test_bad_data(tmp_path, flags, message) -> None:
    with pytest.raises(SystemExit, match=message):
        train(tmp_path / "run", *SMALL, *flags)
    assert not (tmp_path / "run").exists()
