"""A schema: the intents and slots of an application, and which slots go with which intent, as its developers write it.

Written by people who know the application and not read from utterances, it is public, and no noise has to cover it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from edpsgd import files
from tasks.common.flags import load_yaml
from tasks.nlu import generator
from tasks.nlu.corpus import OUTSIDE, Corpus, Rows, word_places
from tasks.nlu.labels import Labels

_LARGEST = 2**20  # bytes: a thousand intents with dozens of slots
_FROM_DATA = "read_from_data"


@dataclass(frozen=True)
class Schema:
    """The labels of an application.

    Attributes:
        intents: their names.
        slots: their names.
        slots_of: those that may go with each intent; None if all may go with all.
        is_confirmed: whether people have said that it is theirs. One that a command has read from utterances is as
            private as these until then.
    """

    intents: Sequence[str]
    slots: Sequence[str]
    slots_of: Mapping[str, Sequence[str]] | None = None
    is_confirmed: bool = True

    def labels(self) -> Labels:
        """What a model can answer."""
        return Labels.of_slots(self.intents, self.slots, read_from_data=not self.is_confirmed)

    def check_covers(self, corpus: Corpus, rows: Rows, file: str) -> None:
        """Refuses a schema that lacks labels of the training set, which are counted and not named.

        Args:
            corpus: the utterances.
            rows: of the training set.
            file: the schema's, for the error.
        """
        pairs = slots_by_intent(corpus, rows)
        intents = set(pairs) - set(self.intents)
        slots = {slot for own in pairs.values() for slot in own} - set(self.slots)
        if intents or slots:
            raise ValueError(f"labels {file} lack {len(intents)} intents and {len(slots)} slots of the training set")
        if self.slots_of is None:
            return
        forbidden = sum(len(own - set(self.slots_of[intent])) for intent, own in pairs.items())
        if forbidden:
            raise ValueError(f"labels {file} forbid {forbidden} pairs of intent and slot that the training set has")

    def text(self) -> str:
        """The file, which ``read`` reads."""
        content: dict[str, Any] = {}
        if not self.is_confirmed:
            content[_FROM_DATA] = True
        if self.slots_of is None:
            content["intents"], content["slots"] = list(self.intents), list(self.slots)
        else:
            content["intents"] = {intent: sorted(self.slots_of[intent]) for intent in self.intents}
        written: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None)
        return written


def read(path: str | Path) -> Schema:
    """The schema of a YAML or JSON file.

    ``intents`` is a mapping from each intent to the list of its slots; or a list, with a list ``slots`` beside it.
    """
    try:
        content = load_yaml(files.read_text(path, _LARGEST))  # JSON is YAML
    except OSError as error:
        raise ValueError(f"cannot read the labels {path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError):  # whose text may be private
        raise ValueError(f"the labels {path} are no YAML or JSON") from None
    try:
        return _schema(content)
    except ValueError as error:
        raise ValueError(f"labels {path}: {error}") from None


def _schema(content: Any) -> Schema:
    if not isinstance(content, dict):
        raise ValueError("there must be names and values: intents, and slots if intents is a list")
    unknown = set(content) - {"intents", "slots", _FROM_DATA}
    if unknown:
        raise ValueError(f"there are {len(unknown)} unknown names beside intents, slots and {_FROM_DATA}")
    is_confirmed = content.get(_FROM_DATA, False) is False
    intents = content.get("intents")
    if not isinstance(intents, dict):
        return Schema(_names(intents, "intents"), _names(content.get("slots"), "slots"), None, is_confirmed)
    slots_of = {intent: _names(own or [], "the slots of an intent") for intent, own in intents.items()}
    known = {slot for own in slots_of.values() for slot in own}
    declared = _names(content["slots"], "slots") if "slots" in content else sorted(known)
    if not known <= set(declared):
        raise ValueError(f"intents have {len(known - set(declared))} slots that the list slots lacks")
    return Schema(_names(list(slots_of), "intents"), declared, slots_of, is_confirmed)


def _names(values: Any, what: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(f"{what} must be a list of texts")
    return values


def of_generator(domains: Sequence[str]) -> Schema:
    """The labels of generated utterances, from their grammar: they are public. Every intent may have every slot."""
    return replace(_of_pairs(generator.slots_by_intent(domains), is_confirmed=True), slots_of=None)


def of_rows(corpus: Corpus, rows: Rows) -> Schema:
    """What some utterances have; if they are private, so is this until somebody confirms it."""
    return _of_pairs(slots_by_intent(corpus, rows), is_confirmed=False)


def _of_pairs(pairs: Mapping[str, set[str]], is_confirmed: bool) -> Schema:
    slots = sorted({slot for own in pairs.values() for slot in own})
    slots_of = {intent: sorted(own) for intent, own in pairs.items()}
    return Schema(sorted(pairs), slots, slots_of, is_confirmed)


def slots_by_intent(corpus: Corpus, rows: Rows) -> dict[str, set[str]]:
    """The slots that stand beside each intent in some utterances."""
    lengths = corpus.starts[rows + 1] - corpus.starts[rows]
    intents = np.repeat(corpus.intent_ids[rows], lengths)
    tags = corpus.tag_ids[word_places(corpus, rows)]
    found: dict[str, set[str]] = {corpus.intents[number]: set() for number in np.unique(corpus.intent_ids[rows])}
    for intent, tag in np.unique(np.stack([intents, tags]), axis=1).T.tolist():
        if corpus.tags[tag] != OUTSIDE:
            found[corpus.intents[intent]].add(corpus.tags[tag][2:])
    return found
