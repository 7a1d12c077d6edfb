"""What all readers share: lines with their numbers, checks of an utterance, and errors that never quote the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edpsgd import files
from tasks.nlu.corpus import OUTSIDE, Utterance

NOT_UTF8 = "it is no valid UTF-8"


class ReadError(ValueError):
    """A file cannot be read. The message names file and line and what is wrong, and holds nothing of the text.

    Example:
        >>> str(ReadError("calls.jsonl", 7, "it is no JSON"))
        'calls.jsonl:7: it is no JSON'
    """

    def __init__(self, file: str | Path, line: int | None, what: str) -> None:
        super().__init__(f"{file}: {what}" if line is None else f"{file}:{line}: {what}")


class Fault(Exception):
    """What is wrong with one utterance; who knows the file and the line makes a ReadError of it."""


@dataclass
class Tally:
    """What was changed or left out while reading.

    Attributes:
        repaired: I- tags without their B-, read as B-.
        skipped: bad lines or utterances.
        left_out: rows that the publishers themselves marked as unusable.
    """

    repaired: int = 0
    skipped: int = 0
    left_out: int = 0


Record = Utterance | ReadError  # a bad line is handed on: whoever reads says whether it ends the reading


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file, one at a time, with their numbers from 1 and without their ends.

    A byte order mark is left out; bytes that are no UTF-8 stay for is_utf8 to find.
    """
    number = 0
    with _opened(path) as file:
        try:
            for number, line in enumerate(files.lines(file), start=1):
                coding = "utf-8-sig" if number == 1 else "utf-8"
                yield number, line.decode(coding, "surrogateescape").rstrip("\r\n")
        except files.LongLine as error:
            raise ReadError(path, error.number, f"the line is longer than {files.LIMIT} bytes") from None
    if number == 0:
        raise ReadError(path, 1, "the file is empty")


def _opened(path: Path) -> BinaryIO:
    try:
        return files.open_bytes(path)
    except FileNotFoundError:
        raise ReadError(path, None, "there is no such file") from None
    except OSError as error:
        raise ReadError(path, None, f"the file cannot be opened ({error.strerror})") from None


def is_utf8(text: str) -> bool:
    """Whether the bytes that the text was read from were UTF-8."""
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False


def check_text(text: str) -> None:
    """Raises Fault if the text was no UTF-8."""
    if not is_utf8(text):
        raise Fault(NOT_UTF8)


def make(words: Sequence[str], tags: Sequence[str], intent: str, tally: Tally) -> Utterance:
    """An utterance after all checks; I- tags without their B- become B- and are counted."""
    if not words:
        raise Fault("the utterance is empty")
    if len(tags) != len(words):
        raise Fault(f"there are {len(tags)} tags for {len(words)} words")
    if not intent:
        raise Fault("the intent is missing")
    for position, tag in enumerate(tags, start=1):
        if not is_tag(tag):
            raise Fault(f"tag {position} is none of O, B-<type>, I-<type>")
    return Utterance(tuple(words), _repaired(tags, tally), intent)


def is_tag(tag: str) -> bool:
    """Whether it is O, B-<type> or I-<type>."""
    return tag == OUTSIDE or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def _repaired(tags: Sequence[str], tally: Tally) -> tuple[str, ...]:
    result, kind = [], ""
    for tag in tags:
        if tag[0] == "I" and tag[2:] != kind:
            tag = f"B-{tag[2:]}"
            tally.repaired += 1
        kind = tag[2:]
        result.append(tag)
    return tuple(result)


def listed(path: Path, *patterns: str) -> list[Path]:
    """The file itself, or the files of a folder that fit one of the patterns, sorted."""
    if not path.is_dir():
        return [path]
    files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    if not files:
        raise ReadError(path, None, f"the folder holds no {' or '.join(patterns)} file")
    return files


def accept(records: Iterable[Record], tally: Tally, skip_bad_lines: bool) -> Iterator[Utterance]:
    """The utterances; a bad line ends the reading with its error, or is counted."""
    for record in records:
        if isinstance(record, Utterance):
            yield record
        elif skip_bad_lines:
            tally.skipped += 1
        else:
            raise record
