"""The two formats for one's own utterances: jsonl, with slots as character offsets or tags, and conll.

jsonl: one object in each line, ``{"text": ..., "intent": ..., "slots": [{"type": ..., "start": ..., "end": ...}]}`` or
``{"tokens": [...], "tags": [...], "intent": ...}``. Offsets count characters (code points), and `end` is the one after
the last.

conll: ``# intent = NAME`` (or ``# intent: NAME``), then a token and its tag in each line; a blank line ends the
utterance. Other lines that begin with ``# `` before the first token are comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.common.text_files import (
    Fault,
    ReadError,
    check_text,
    json_member,
    json_object,
    matching_files,
    numbered_lines,
)
from tasks.nlu.corpus import OUTSIDE, Utterance
from tasks.nlu.utterance_checks import Record, Tally, checked_utterance, is_tag


def read_jsonl(path: Path, tally: Tally) -> Iterator[Record]:
    """The utterances of a jsonl file, or of all in a folder."""
    for file in matching_files(path, "*.jsonl"):
        for number, line in numbered_lines(file):
            if line.strip():
                yield _read_line(line, file, number, tally)


def _read_line(line: str, file: Path, number: int, tally: Tally) -> Record:
    try:
        check_text(line)
        return _from_object(json_object(line), tally)
    except Fault as fault:
        return ReadError(file, number, str(fault))


def _from_object(value: dict[str, Any], tally: Tally) -> Utterance:
    intent = json_member(value, "intent", str).strip()
    if "tokens" in value or "tags" in value:
        words, tags = _strings(value, "tokens"), _strings(value, "tags")
        if any(len(word.split()) != 1 for word in words):
            raise Fault("a token is empty or holds a blank")
    else:
        words, tags = _from_text(json_member(value, "text", str), json_member(value, "slots", list))
    check_text("".join([intent, *words, *tags]))  # JSON can spell half a character
    return checked_utterance(words, tags, intent, tally)


def _strings(value: dict[str, Any], key: str) -> list[str]:
    items: list[str] = json_member(value, key, list)
    if not all(isinstance(item, str) for item in items):
        raise Fault(f"{key!r} must be a list of strings")
    return items


def _from_text(text: str, slots: list[Any]) -> tuple[list[str], list[str]]:
    """The words of a text, and a tag for each."""
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    tags = [OUTSIDE] * len(spans)
    for number, slot in enumerate(slots, start=1):
        kind = json_member(slot, "type", str)
        start, end = json_member(slot, "start", int), json_member(slot, "end", int)
        if len(kind.split()) != 1:
            raise Fault(f"the type of slot {number} is empty or holds a blank")
        if not 0 <= start < end <= len(text):
            raise Fault(f"slot {number} is outside the text, or ends before it starts")
        covered = _covered_words(spans, start, end, number)
        if any(tags[word] != OUTSIDE for word in covered):
            raise Fault(f"slot {number} overlaps another")
        tags[covered.start : covered.stop] = [f"B-{kind}"] + [f"I-{kind}"] * (len(covered) - 1)
    return [text[first:last] for first, last in spans], tags


def _covered_words(spans: list[tuple[int, int]], start: int, end: int, number: int) -> range:
    """The words that a slot covers from the first character of one to the last of another.

    Args:
        spans: the first character of each word, and the one after its last.
        start: the first character of the slot.
        end: the one after its last.
        number: of the slot, for errors.
    """
    touched = [word for word, (first, last) in enumerate(spans) if first < end and last > start]
    if not touched:
        raise Fault(f"slot {number} covers no word")
    covered = range(touched[0], touched[-1] + 1)
    if spans[covered[0]][0] < start or spans[covered[-1]][1] > end:
        raise Fault(f"slot {number} cuts a word; words are what blanks separate")
    return covered


# ---------------------------------------------------------------- conll


_INTENT = re.compile(r"#\s+intent\s*[=:]\s*(.*)")


@dataclass
class _Block:
    """What was read of an utterance so far."""

    start: int
    intent: str | None = None
    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    error: ReadError | None = None  # the first


def read_conll(path: Path, tally: Tally) -> Iterator[Record]:
    """The utterances of a conll file, or of all in a folder."""
    for file in matching_files(path, "*.conll", "*.txt"):
        block: _Block | None = None
        for number, line in numbered_lines(file):
            if line.strip():
                block = block or _Block(number)
                _add_line(block, line, file, number)
            elif block:
                yield from _finished(block, file, tally)
                block = None
        if block:
            yield from _finished(block, file, tally)


def _add_line(block: _Block, line: str, file: Path, number: int) -> None:
    """Adds a line to its utterance, or the first error in it."""
    try:
        check_text(line)
        _add_text(block, line)
    except Fault as fault:
        block.error = block.error or ReadError(file, number, str(fault))


def _add_text(block: _Block, line: str) -> None:
    """Adds what a line says: the intent, a token with its tag, or nothing if it is a comment."""
    intent, columns = _INTENT.fullmatch(line.strip()), line.split()
    if intent:
        if block.words or block.intent is not None:
            raise Fault("another intent in the middle of an utterance: is a blank line missing?")
        block.intent = intent[1]
    elif len(columns) == 2 and is_tag(columns[1]):
        block.words.append(columns[0])
        block.tags.append(columns[1])
    elif columns[0] == "#" and not block.words:
        return
    elif len(columns) != 2:
        raise Fault(f"there must be a token and its tag, but there are {len(columns)} columns")
    else:
        raise Fault("the tag is none of O, B-<type>, I-<type>")


def _finished(block: _Block, file: Path, tally: Tally) -> Iterator[Record]:
    """The utterance of a block or its error; nothing if it held only comments."""
    if block.error:
        yield block.error
    elif not block.words and block.intent is None:
        return
    else:
        try:
            yield checked_utterance(block.words, block.tags, block.intent or "", tally)
        except Fault as fault:
            yield ReadError(file, block.start, str(fault))
