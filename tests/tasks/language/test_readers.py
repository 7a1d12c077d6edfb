"""Files of users' texts and their errors, which never quote a text."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from tasks.common.text_files import ReadError
from tasks.language.dictionary import Dictionary
from tasks.language.readers import read_jsonl, read_shakespeare, write_jsonl
from tasks.language.user_texts import RawUsers
from tests.helpers.corpora import data_folder, written
from tests.helpers.users import assert_refused, lists


def test_speeches(tmp_path) -> None:
    """A line of a speech may end with a colon; a speaker may be silent."""
    written(tmp_path, {"play.txt": "ANNA:\nHe said:\nBEN:\n\nBEN:\n\n\nFirst Lord:\nNo.\r\n\nANNA:\nYes. \n"})
    assert read_shakespeare(tmp_path) == RawUsers(["ANNA", "First Lord"], [["He said:", "BEN:", "Yes."], ["No."]])


def test_the_real_plays() -> None:
    """Counted a second time by cutting the text at blank lines."""
    file = data_folder() / "shakespeare" / "input.txt"
    if not file.is_file():
        pytest.skip("there is no shakespeare/input.txt among the corpora")
    speeches = [block.strip("\n").split("\n") for block in file.read_text().split("\n\n") if block.strip()]
    spoken = Counter({speech[0]: 0 for speech in speeches})
    for speech in speeches:
        spoken[speech[0]] += sum(bool(line.strip()) for line in speech[1:])
    users = read_shakespeare(file)
    assert {f"{name}:": len(texts) for name, texts in zip(users.names, users.texts, strict=True)} == +spoken
    data = users.numbered(Dictionary.from_texts(itertools.chain(*users.texts), size=100_000))
    assert len(data.sentences) - 1 == sum(spoken.values())
    assert data.tokens.min() == 3  # every word is known


@pytest.mark.parametrize(
    ("content", "where", "message"),
    [
        (b"Secret words.\n", ":1", "must begin with the name"),
        (b"ANNA:\nYes.\n\nSecret words.\n", ":4", "must begin with the name"),
        (b"ANNA:\nsecret \xff\n", ":2", "UTF-8"),
        (b":\nSecret.\n", ":1", "must begin with the name"),
        (b"", ":1", "empty"),
        (b"\n\n", "", "no text of any user"),
    ],
)
def test_bad_speeches(content, where, message, tmp_path) -> None:
    assert_refused(read_shakespeare, tmp_path, content, f"{where}: .*{message}")


def test_lines_of_users_anywhere_in_the_file(tmp_path) -> None:
    rows = [("b", "One."), (7, "Zwei – two"), ("b", ""), ("7", "drei\nlines"), ("ä", "x")]
    text = "\n\n".join(json.dumps({"user": user, "text": text}) for user, text in rows)
    written(tmp_path, {"in.jsonl": text})
    users = read_jsonl(tmp_path / "in.jsonl")
    assert users == RawUsers(["b", "7", "ä"], [["One.", ""], ["Zwei – two", "drei\nlines"], ["x"]])
    write_jsonl(tmp_path / "out.jsonl", users)
    assert read_jsonl(tmp_path / "out.jsonl") == users
    numbered = users.numbered(Dictionary(["one", "two", "lines"]))
    assert lists(numbered) == [[[3, 0], []], [[0, 0, 4], [0, 5]], [[0]]]


GOOD = b'{"user": "a", "text": "x"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"user": "a", "text": secret}', "no valid JSON"),
        (b'["secret"]', "no JSON object"),
        (b'{"text": "secret"}', "'user' is missing"),
        (b'{"user": "secret"}', "'text' is missing"),
        (b'{"user": 1.5, "text": "secret"}', "'user' must be a string or a whole number"),
        (b'{"user": true, "text": "secret"}', "'user' must be a string or a whole number"),
        (b'{"user": null, "text": "secret"}', "'user' must be a string or a whole number"),
        (b'{"user": "a", "text": ["secret"]}', "'text' must be a string"),
        (b'{"user": "a", "text": "secret \xff"}', "UTF-8"),
        (b'{"user": "a", "text": "secret \\ud800"}', "UTF-8"),
    ],
)
def test_bad_lines(line, message, tmp_path) -> None:
    assert_refused(read_jsonl, tmp_path, GOOD + b"\n" + line + b"\n" + GOOD, f":3: .*{message}")


def test_files_without_users(tmp_path) -> None:
    written(tmp_path, {"empty.jsonl": "", "blank.jsonl": "\n \n"})
    with pytest.raises(ReadError, match="empty.jsonl:1: the file is empty"):
        read_jsonl(tmp_path / "empty.jsonl")
    with pytest.raises(ReadError, match="blank.jsonl: there is no text of any user"):
        read_jsonl(tmp_path / "blank.jsonl")
    with pytest.raises(ReadError, match="there is no such file"):
        read_jsonl(tmp_path / "none.jsonl")
