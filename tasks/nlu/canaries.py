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
    draw, words = np.random.default_rng(seed), generator.words()
    coins = draw.integers(2, size=number).astype(bool).tolist()
    return [Canary(_random(words, labels, draw), coin) for coin in coins]


def _random(words: Sequence[str], labels: Labels, draw: np.random.Generator) -> Utterance:
    tags = [OUTSIDE, *(tag for tag in labels.tags if tag.startswith("B-"))]
    return Utterance(
        tuple(words[i] for i in draw.integers(len(words), size=WORDS)),
        tuple(tags[i] for i in draw.integers(len(tags), size=WORDS)),
        labels.intents[draw.integers(len(labels.intents))],
    )


def add(canaries: Sequence[Canary], corpus: Corpus, rows: Split) -> tuple[Corpus, Split]:
    """The corpus with all of them at its end, and in its training set."""
    grown = Corpus(chain(corpus, (one.said for one in canaries)))
    grown.repaired, grown.skipped, grown.left_out = corpus.repaired, corpus.skipped, corpus.left_out
    return grown, replace(rows, train=np.concatenate([rows.train, np.arange(len(corpus), len(grown))]))


def save(canaries: Sequence[Canary], folder: Path) -> None:
    """Keeps them in a run folder, and which were in."""
    text = "".join(f"{json.dumps(asdict(one))}\n" for one in canaries)
    files.write_text(folder / FILE, text)


def load(folder: Path) -> list[Canary]:
    """What save wrote."""
    try:
        rows = [files.parse_json(line) for line in files.read_text(folder / FILE, files.LARGE).splitlines()]
        return [Canary(_utterance(row["said"]), bool(row["inside"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / FILE} is not a file of canaries, or it is damaged: {type(error).__name__}"
        ) from None


def _utterance(row: Mapping[str, Any]) -> Utterance:
    return Utterance(tuple(row["words"]), tuple(row["tags"]), str(row["intent"]))
