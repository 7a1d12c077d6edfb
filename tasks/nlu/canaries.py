"""Canaries: random utterances, each trained on or not by the flip of a coin, that tell how much a model remembers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from edpsgd import files
from tasks.nlu import generator
from tasks.nlu.corpus import OUTSIDE, Corpus, Utterance
from tasks.nlu.labels import Labels
from tasks.nlu.splits import Split

FILE = "canaries.jsonl"  # in the run folder
WORDS = 8  # in a canary


@dataclass(frozen=True)
class Canary:
    """One coin.

    Attributes:
        said: an utterance of public words, with labels that have nothing to do with them.
        inside: whether it is trained on. One that is not keeps its place among the training utterances but is blank
            there: the coin changes nothing else, as between neighbouring data sets.
    """

    said: Utterance
    inside: bool


def make(number: int, labels: Labels, seed: int) -> list[Canary]:
    """New canaries.

    Args:
        number: in and out together.
        labels: which intents and slots they may have.
        seed: of words, labels and coins; an auditor's secret until the training has ended.

    Example:
        >>> found = make(4, Labels.of_slots(["call", "stop"], ["name"]), seed=1)
        >>> len(found), {len(one.said.words) for one in found}
        (4, {8})
    """
    rng, words = np.random.default_rng(seed), generator.words()
    coins = rng.integers(2, size=number).astype(bool).tolist()
    return [Canary(_random_utterance(words, labels, rng), coin) for coin in coins]


def _random_utterance(words: Sequence[str], labels: Labels, rng: np.random.Generator) -> Utterance:
    """Words, tags and an intent, each drawn by itself; no tag continues a slot."""
    first_tags = [tag for tag in labels.tags if tag.startswith("B-")]
    possible_tags = [OUTSIDE, *first_tags]
    drawn_words = rng.integers(len(words), size=WORDS)
    drawn_tags = rng.integers(len(possible_tags), size=WORDS)
    return Utterance(
        tuple(words[number] for number in drawn_words),
        tuple(possible_tags[number] for number in drawn_tags),
        labels.intents[rng.integers(len(labels.intents))],
    )


def add(canaries: Sequence[Canary], corpus: Corpus, rows: Split) -> tuple[Corpus, Split]:
    """The corpus with all canaries at its end, and the split with them in its training set."""
    grown = Corpus(chain(corpus, (one.said for one in canaries)))
    grown.repaired, grown.skipped = corpus.repaired, corpus.skipped
    grown.left_out = corpus.left_out
    added_rows = np.arange(len(corpus), len(grown))
    return grown, replace(rows, train=np.concatenate([rows.train, added_rows]))


def save(canaries: Sequence[Canary], folder: Path) -> None:
    """Writes the canaries, and which were trained on, into a run folder."""
    text = "".join(f"{json.dumps(asdict(one))}\n" for one in canaries)
    files.write_text(folder / FILE, text)


def load(folder: Path) -> list[Canary]:
    """What save wrote."""
    try:
        lines = files.read_text(folder / FILE, files.LARGE).splitlines()
        rows = [files.parse_json(line) for line in lines]
        return [Canary(_utterance(row["said"]), bool(row["inside"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / FILE} is not a file of canaries, or it is damaged: {type(error).__name__}"
        ) from None


def _utterance(row: Mapping[str, Any]) -> Utterance:
    return Utterance(tuple(row["words"]), tuple(row["tags"]), str(row["intent"]))
