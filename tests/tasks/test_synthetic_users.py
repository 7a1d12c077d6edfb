"""The command that writes synthetic users and the public list of their words."""

from __future__ import annotations

import pytest

from tasks.language.dictionary import Dictionary
from tasks.language.readers import read_jsonl
from tasks.language.user_generator import generate, generate_words
from tasks.synthetic_users import main


def test_what_is_written_is_read_back(tmp_path) -> None:
    main(["5", "--sentences", "4", "--words", "30", "--seed", "2", "--output", str(tmp_path / "made")])
    assert read_jsonl(tmp_path / "made" / "users.jsonl") == generate(5, 2, 4, 30)
    assert Dictionary.load(tmp_path / "made" / "dictionary.txt").words == generate_words(30)


def test_errors_are_one_line(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="error: users must be"):
        main(["0", "--output", str(tmp_path / "made")])
    with pytest.raises(SystemExit, match="error: .*file"):
        main(["1", "--output", str(tmp_path / "file" / "made")])
