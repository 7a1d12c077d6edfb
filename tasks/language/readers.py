"""Users' texts in files: plays, whose speakers are the users, and lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tasks.common.text_files import (
    Fault,
    ReadError,
    check_text,
    json_member,
    json_object,
    matching_files,
    numbered_lines,
)
from tasks.language.user_texts import RawUsers


def read_shakespeare(path: str | Path) -> RawUsers:
    """Plays: a line "SPEAKER:", the lines of the speech, a blank line. Speakers are users, lines are sentences."""
    files = matching_files(Path(path), "*.txt")
    return _grouped(Path(path), chain.from_iterable(map(_spoken, files)))


def read_jsonl(path: str | Path) -> RawUsers:
    """JSON Lines, a file or all in a folder: ``{"user": ..., "text": ...}``, each line a sentence.

    The user is a string or a whole number; 7 and "7" are the same. Lines of one user may be anywhere.
    """
    files = matching_files(Path(path), "*.jsonl")
    return _grouped(Path(path), chain.from_iterable(map(_listed_texts, files)))


def write_jsonl(path: str | Path, users: RawUsers) -> None:
    """Writes what read_jsonl reads. A user without texts leaves no line."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for name, texts in zip(users.names, users.texts, strict=True):
            file.writelines(json.dumps({"user": name, "text": text}) + "\n" for text in texts)


def _grouped(path: Path, pairs: Iterable[tuple[str, str]]) -> RawUsers:
    """Users in the order of their first text."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        found.setdefault(name, []).append(text)
    if not found:
        raise ReadError(path, None, "there is no text of any user in it")
    return RawUsers(list(found), list(found.values()))


def _spoken(file: Path) -> Iterator[tuple[str, str]]:
    """The lines of a play, each with its speaker."""
    speaker = ""
    for number, line in numbered_lines(file):
        try:
            check_text(line)
            if speaker and line.strip():
                yield speaker, line.strip()
            else:  # a line of a speech may end with a colon too, so only the first one can name a speaker
                speaker = _speaker(line.strip())
        except Fault as fault:
            raise ReadError(file, number, str(fault)) from None


def _speaker(line: str) -> str:
    """The speaker whom the first line of a speech names; of a blank line, the empty name."""
    name = line.removesuffix(":")
    if line and (name == line or not name):
        raise Fault("a speech must begin with the name of its speaker and a colon")
    return name


def _listed_texts(file: Path) -> Iterator[tuple[str, str]]:
    """The texts of a JSON Lines file, each with its user."""
    for number, line in numbered_lines(file):
        try:
            check_text(line)
            if line.strip():
                yield _pair(line)
        except Fault as fault:
            raise ReadError(file, number, str(fault)) from None


def _pair(line: str) -> tuple[str, str]:
    """The user and the text of a line."""
    value = json_object(line)
    user = value.get("user", "")
    if isinstance(user, bool) or not isinstance(user, str | int):
        raise Fault("'user' must be a string or a whole number")
    pair = str(json_member(value, "user", type(user))), json_member(value, "text", str)
    check_text("".join(pair))  # JSON can spell half a character
    return pair
