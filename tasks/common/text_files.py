"""Files of text, line by line, with errors that name file and line and never quote the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from edpsgd import files

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
    """What is wrong with one utterance; the caller, who knows file and line, makes a ReadError."""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
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


def matching_files(path: Path, *patterns: str) -> list[Path]:
    """The file itself, or the files of a folder that fit one of the patterns, sorted."""
    if not path.is_dir():
        return [path]
    found: set[Path] = set()
    for pattern in patterns:
        found.update(path.glob(pattern))
    if not found:
        raise ReadError(path, None, f"the folder holds no {' or '.join(patterns)} file")
    return sorted(found)


def json_object(line: str) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        value = files.parse_json(line)
    except ValueError:
        raise Fault("it is no valid JSON") from None
    if not isinstance(value, dict):
        raise Fault("it is no JSON object")
    return value


def json_member(value: Any, key: str, kind: type) -> Any:
    """A member of a JSON object, of the right type."""
    if not isinstance(value, dict) or key not in value:
        raise Fault(f"the key {key!r} is missing")
    if not isinstance(value[key], kind) or isinstance(value[key], bool):
        names = {str: "a string", list: "a list", int: "a whole number"}
        raise Fault(f"{key!r} must be {names[kind]}")
    return value[key]
