"""Checks of an utterance that was read, the repair of its tags, and the count of what was skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tasks.common.text_files import Fault, ReadError
from tasks.nlu.corpus import OUTSIDE, Utterance


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


# A bad line is handed on: the caller decides whether it ends the reading.
Record = Utterance | ReadError


def checked_utterance(words: Sequence[str], tags: Sequence[str], intent: str, tally: Tally) -> Utterance:
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
    """The tags with a B- wherever a slot begins; each that was an I- is counted."""
    result, kind = [], ""
    for tag in tags:
        if tag[0] == "I" and tag[2:] != kind:
            tag = f"B-{tag[2:]}"
            tally.repaired += 1
        kind = tag[2:]
        result.append(tag)
    return tuple(result)


def accepted(records: Iterable[Record], tally: Tally, skip_bad_lines: bool) -> Iterator[Utterance]:
    """The utterances; a bad line ends the reading with its error, or is counted."""
    for record in records:
        if isinstance(record, Utterance):
            yield record
        elif skip_bad_lines:
            tally.skipped += 1
        else:
            raise record
