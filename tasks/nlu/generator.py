"""Generated utterances of an assistant, with intents and slots: as many as you like, and nobody's secret.

The draws come from ``random.Random(seed).random()`` alone, whose sequence Python guarantees for a seed: a seed gives
the same utterances on every machine, and the first thousand of a million are those of a thousand.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, islice
from typing import NamedTuple

from tasks.nlu import grammar, harder_grammar
from tasks.nlu.corpus import OUTSIDE, Utterance

EASIER = tuple(grammar.TEMPLATES)
HARDER = tuple(harder_grammar.TEMPLATES)
DOMAINS = (*EASIER, *HARDER)
_TEMPLATES = grammar.TEMPLATES | harder_grammar.TEMPLATES
_PHRASES = grammar.PHRASES | harder_grammar.PHRASES


class _Part(NamedTuple):
    """A word, or any phrase of that name; and the tags of its first word and of the others."""

    word: str
    phrase: str
    first: str
    rest: str


_Pattern = tuple[_Part, ...]
_PART = re.compile(r"<(\w+)>|\{(\w+)(?::(\w+))?\}|([^\s<>{}]+)")


def utterances(count: int, seed: int = 0, domains: Sequence[str] = EASIER) -> Iterator[Utterance]:
    """Draws utterances; their intents are equally frequent.

    Args:
        count: how many.
        seed: the same seed and domains give the same utterances everywhere.
        domains: some of DOMAINS; slots of the harder ones are harder to tell apart.

    Example:
        >>> [found] = utterances(1, seed=5, domains=["health"])
        >>> len(found.words) == len(found.tags), found.intent.endswith("_video")
        (True, False)
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"count must be an int >= 0, got {count!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an int, got {seed!r}")
    check_domains(domains)
    return islice(_endless(random.Random(seed).random, domains), count)


def check_domains(domains: Sequence[str]) -> None:
    """Refuses names that are no domains."""
    if isinstance(domains, str) or not domains or not set(domains) <= set(DOMAINS):
        raise ValueError(f"domains must be some of {', '.join(DOMAINS)}, got {domains!r}")


def slots_by_intent(domains: Sequence[str] = EASIER) -> dict[str, set[str]]:
    """The intents of some domains, and the slots that each may have: as public as the grammar.

    Example:
        >>> sorted(slots_by_intent(["health"])["log_measurement"])
        ['contact', 'date', 'measure', 'reading', 'time']
    """
    check_domains(domains)
    found = {}
    for intent, templates in _intents(domains):
        parts = chain.from_iterable(templates)
        found[intent] = {part.first[2:] for part in parts if part.first != OUTSIDE}
    return found


def words(domains: Sequence[str] = EASIER) -> list[str]:
    """All words that can be said in some domains, except numbers in digits, sorted: a public list.

    Example:
        >>> "doctor" in words(), "7" in words()
        (True, False)
    """
    todo: list[_Part] = []
    for _, templates in _intents(domains):
        todo += chain.from_iterable(templates)
    found, seen = set(), set()
    while todo:
        part = todo.pop()
        if part.word:
            found.add(part.word)
        elif part.phrase not in seen:
            seen.add(part.phrase)
            todo += chain.from_iterable(_patterns(part.phrase))
    return sorted(word for word in found if not word.isdigit())


def _endless(draw: Callable[[], float], domains: Sequence[str]) -> Iterator[Utterance]:
    """Utterances without an end. A choice is a draw from 0 to 1 times the number of choices."""
    intents = _intents(domains)
    while True:
        intent, templates = intents[int(draw() * len(intents))]
        said: list[str] = []
        tags: list[str] = []
        for part in templates[int(draw() * len(templates))]:
            _say(part, draw, said)
            if len(said) > len(tags):  # a phrase may be empty
                tags.append(part.first)
                tags += [part.rest] * (len(said) - len(tags))
        yield Utterance(tuple(said), tuple(tags), intent)


def _say(part: _Part, draw: Callable[[], float], said: list[str]) -> None:
    """Adds the words of a part to what is said; a phrase is chosen and said part by part."""
    if part.word:
        said.append(part.word)
        return
    patterns = _patterns(part.phrase)
    for inner in patterns[int(draw() * len(patterns))]:
        _say(inner, draw, said)


# ---------------------------------------------------------------- the grammar, parsed


def _intents(domains: Sequence[str]) -> list[tuple[str, list[_Pattern]]]:
    """The intents of the domains, each with its templates."""
    found = []
    for domain in domains:
        for intent, templates in _TEMPLATES[domain].items():
            patterns = [_parsed(_framed(template)) for template in templates]
            found.append((intent, patterns))
    return found


def _framed(template: str) -> str:
    """With polite words around it."""
    if template.endswith((" ?", " .")):
        return f"<greeting> {template[:-2]}"
    return f"<before> {template} <after>"


@cache
def _patterns(phrase: str) -> list[_Pattern]:
    return [_parsed(text) for text in _PHRASES[phrase]]


def _parsed(text: str) -> _Pattern:
    return tuple(_part(*match.groups(default="")) for match in _PART.finditer(text))


def _part(plain: str, slot: str, phrase: str, word: str) -> _Part:
    if slot:
        return _Part("", phrase or slot, f"B-{slot}", f"I-{slot}")
    return _Part(word, plain, OUTSIDE, OUTSIDE)
