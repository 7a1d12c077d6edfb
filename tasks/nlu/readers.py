"""Readers of the corpora: ATIS and SNIPS (slot-gated layout), NLU-EVAL (csv), and users' own jsonl and conll files.

Every file is read line by line, so that memory holds no more than the Corpus. Errors name file and line and never
quote the text.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from tasks.common.text_files import NOT_UTF8, Fault, ReadError, check_text, is_utf8, matching_files, numbered_lines
from tasks.nlu.corpus import OUTSIDE, Corpus, Utterance
from tasks.nlu.jsonl_conll import read_conll, read_jsonl
from tasks.nlu.utterance_checks import Record, Tally, accepted, checked_utterance

__all__ = ["TASKS", "ReadError", "read"]

PARTS = ("train", "valid", "test")
ALIGNED = ("seq.in", "seq.out", "label")
COLUMNS = ("scenario", "intent", "answer_annotation")


def read(task: str, path: str | Path, skip_bad_lines: bool = False) -> Corpus:
    """Reads a corpus. Its train, validation and test parts, and the files of a folder, are pooled.

    Args:
        task: one of TASKS.
        path: of atis, snips and nlu-eval the folder, or the one that holds it; of nlu-eval also a csv file; of jsonl
            and conll a file, or a folder of *.jsonl, or of *.conll and *.txt.
        skip_bad_lines: leave out bad lines and count them in ``corpus.skipped``. A missing or empty file, a missing
            column and aligned files of unequal length stay errors.

    Returns:
        The corpus; its `repaired`, `skipped` and `left_out` say what was changed or left out.

    Raises:
        ReadError: a ValueError whose message begins with the file and the line.

    Example:
        >>> import json, tempfile
        >>> file = Path(tempfile.mkdtemp()) / "calls.jsonl"
        >>> line = {"text": "call anna", "intent": "call", "slots": [{"type": "name", "start": 5, "end": 9}]}
        >>> _ = file.write_text(json.dumps(line))
        >>> read("jsonl", file)[0].tags
        ('O', 'B-name')
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    tally = Tally()
    records = TASKS[task](Path(path), tally)
    corpus = Corpus(_some(accepted(records, tally, skip_bad_lines), Path(path), tally))
    corpus.repaired, corpus.skipped, corpus.left_out = tally.repaired, tally.skipped, tally.left_out
    return corpus


def _some(utterances: Iterator[Utterance], path: Path, tally: Tally) -> Iterator[Utterance]:
    """The same utterances, or an error if there is none."""
    is_empty = True
    for utterance in utterances:
        is_empty = False
        yield utterance
    if is_empty:
        raise ReadError(
            path, None, f"there is no utterance ({tally.skipped} bad lines skipped, {tally.left_out} rows left out)"
        )


# ---------------------------------------------------------------- ATIS and SNIPS


def _read_aligned(name: str) -> Callable[[Path, Tally], Iterator[Record]]:
    """The reader of a corpus whose folder has that name."""

    def records(path: Path, tally: Tally) -> Iterator[Record]:
        folder = path / name if (path / name).is_dir() else path
        parts = [folder / part for part in PARTS if (folder / part).is_dir()]
        if not parts:
            raise ReadError(folder, None, f"the folder holds none of {', '.join(PARTS)}")
        for part in parts:
            yield from _read_part([part / file for file in ALIGNED], tally)

    return records


def _read_part(files: Sequence[Path], tally: Tally) -> Iterator[Record]:
    """Line n of each file belongs to utterance n."""
    line_pairs = [numbered_lines(file) for file in files]
    for number, row in enumerate(zip_longest(*line_pairs), start=1):
        for file, line in zip(files, row, strict=True):
            if line is None:
                raise ReadError(file, number, "the file has ended, but those beside it go on")
        yield _aligned([text for _, text in row], files, number, tally)


def _aligned(texts: Sequence[str], files: Sequence[Path], number: int, tally: Tally) -> Record:
    """The utterance of words, tags and an intent, or what is wrong with its line."""
    for file, text in zip(files, texts, strict=True):
        if not text.strip():
            return ReadError(file, number, "the line is empty")
        if not is_utf8(text):
            return ReadError(file, number, NOT_UTF8)
    try:
        return checked_utterance(texts[0].split(), texts[1].split(), texts[2].strip(), tally)
    except Fault as fault:
        return ReadError(files[1], number, str(fault))  # what may be wrong now is a tag


# ---------------------------------------------------------------- NLU-EVAL


def _read_nlu_eval(path: Path, tally: Tally) -> Iterator[Record]:
    folder = path / "nlu-eval" if (path / "nlu-eval").is_dir() else path
    for file in matching_files(folder, "*.csv"):
        rows = numbered_lines(file)
        names = _header(next(rows)[1], file)
        for number, line in rows:
            if line.strip():
                yield from _read_row(names, line, file, number, tally)


def _header(line: str, file: Path) -> list[str]:
    names = [name.strip() for name in next(csv.reader([line], delimiter=";"), [])]
    for name in COLUMNS:
        if name not in names:
            raise ReadError(file, 1, f"the column {name} is missing; columns are separated by ;")
    return names


def _read_row(names: list[str], line: str, file: Path, number: int, tally: Tally) -> Iterator[Record]:
    """One utterance, or none if the row is to be left out."""
    try:
        fields = _fields(names, line)
        if _is_left_out(fields):
            tally.left_out += 1
            return
        if not (fields["scenario"] and fields["intent"]):
            raise Fault("scenario or intent is missing")
        words, tags = _annotated(fields["answer_annotation"])
        yield checked_utterance(words, tags, f"{fields['scenario']}_{fields['intent']}", tally)
    except Fault as fault:
        yield ReadError(file, number, str(fault))


def _fields(names: list[str], line: str) -> dict[str, str]:
    """The columns of a row. A row is one line: a quotation mark that is not closed spoils no other row."""
    check_text(line)
    reader = csv.reader([line, ""], delimiter=";")
    try:
        row = next(reader)
    except csv.Error:
        raise Fault("it is no csv") from None
    if reader.line_num > 1:
        raise Fault("a quotation mark is not closed in its line")
    if len(row) != len(names):
        raise Fault(f"the row has {len(row)} fields, and the header {len(names)}")
    values = [field.strip() for field in row]
    return dict(zip(names, values, strict=True))


def _is_left_out(fields: dict[str, str]) -> bool:
    """Whether a row is empty, or irrelevant to its publishers, who leave it out too."""
    is_irrelevant = fields.get("status", "").startswith("IRR")  # IRR, IRR_XL and IRR_XR
    is_empty = fields["answer_annotation"] in ("", "null")
    return is_irrelevant or is_empty


_PIECES = re.compile(r"\[([^\[\]]*)\]|([\[\]])|[^\s\[\]]+")


def _annotated(text: str) -> tuple[list[str], list[str]]:
    """Words and tags of ``wake me at [time : five am]``. A bracket also ends a word: ``[name : ann],`` are two."""
    words: list[str] = []
    tags: list[str] = []
    for piece in _PIECES.finditer(text):
        slot, stray = piece.groups()
        if stray:
            raise Fault("a bracket has no partner, or brackets are nested")
        if slot is None:
            words.append(piece.group())
            tags.append(OUTSIDE)
            continue
        kind, values = _slot(slot)
        words += values
        tags += [f"B-{kind}"] + [f"I-{kind}"] * (len(values) - 1)
    return words, tags


def _slot(text: str) -> tuple[str, list[str]]:
    """The type and the words of what stands between brackets; there is one word at least."""
    kind, colon, value = text.partition(":")
    values = value.lstrip(":").split()
    if not colon or len(kind.split()) != 1 or not values:
        raise Fault("a bracket is not of the form [type : value]")
    return kind.strip(), values


TASKS: dict[str, Callable[[Path, Tally], Iterator[Record]]] = {
    "atis": _read_aligned("atis"),
    "snips": _read_aligned("snips"),
    "nlu-eval": _read_nlu_eval,
    "jsonl": read_jsonl,
    "conll": read_conll,
}
