"""Whom an attack is about: members and non-members of a run's training set, without those that would spoil it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tasks.nlu.configuration import Config, read_file
from tasks.nlu.corpus import Corpus, Rows, word_places
from tasks.nlu.dataset import Data
from tasks.nlu.dataset import load as load_data
from tasks.nlu.labels import Labels
from tasks.nlu.run_folder import Parts, check_data, check_ended, load
from tasks.nlu.splits import Hashes, forms, text_hashes


@dataclass(frozen=True)
class Run:
    """A finished training and its data.

    Attributes:
        folder: of the run.
        config: its settings.
        workers: how many took part.
        parts: the model.
        data: what was trained, validated and tested on.
    """

    folder: Path
    config: Config
    workers: int
    parts: Parts
    data: Data


def open_run(folder: str | Path, data: str | None = None) -> Run:
    """A run folder of tasks.train, and the data that it names.

    Args:
        folder: the run.
        data: where the data are now, if they were moved.
    """
    folder = Path(folder)
    parts = load(folder)
    check_ended(folder)
    config = Config(**read_file(folder / "config.yaml"))
    config = config if data is None else replace(config, data=data)
    found = load_data(config, folder, seed=0)
    facts = check_data(folder, found.rows)
    return Run(folder, config, int(facts.get("workers", 1)), parts, found)


@dataclass(frozen=True)
class Candidates:
    """Utterances that may have been trained on.

    Attributes:
        rows: of the corpus.
        members: which of them were trained on.
        population: other rows that were not trained on, for attacks that compare with them.
        near_duplicates: how many were left out because members and non-members have the same form or words.
        unknown_labels: how many because their labels are unknown to the model, or to the test set.
    """

    rows: Rows
    members: npt.NDArray[np.bool_]
    population: Rows
    near_duplicates: int
    unknown_labels: int


def candidates(data: Data, labels: Labels, seed: int = 0) -> Candidates:
    """As many members as non-members, drawn from the training and the test set; then those that spoil it are left out.

    Args:
        data: of a run; its canaries are no candidates.
        labels: of its model.
        seed: of the draw.
    """
    corpus, rows = data.corpus, data.without_canaries()
    size = min(len(rows.train), len(rows.test))
    if size == 0:
        raise ValueError(
            f"there are {len(rows.train)} members and {len(rows.test)} held-out utterances: an attack needs both"
        )
    draw = np.random.default_rng(seed)
    inside, outside = (np.sort(draw.choice(part, size, replace=False)) for part in (rows.train, rows.test))
    drawn, members = np.concatenate([inside, outside]), np.arange(2 * size) < size
    others = np.setdiff1d(np.concatenate([rows.validation, rows.test]), outside)
    keys = forms(corpus), text_hashes(corpus, seed=0)
    is_near = np.concatenate([_shared(keys, inside, outside), _shared(keys, outside, rows.train)])
    is_known = [_known(corpus, some, labels, Labels.of_rows(corpus, rows.test)) for some in (drawn, others)]
    kept = ~is_near & is_known[0]
    found = int(is_near.sum()), int((~is_near & ~is_known[0]).sum())
    if not members[kept].any() or members[kept].all():
        raise ValueError(
            f"of {size} members and {size} non-members none are left on one side: {found[0]} are near duplicates of "
            f"each other, {found[1]} have labels unknown to the model"
        )
    population = others[is_known[1] & ~_shared(keys, others, rows.train)]
    return Candidates(drawn[kept], members[kept], population, *found)


def _shared(keys: Sequence[Hashes], rows: Rows, others: Rows) -> npt.NDArray[np.bool_]:
    """Whether an utterance has the form or the words of one of the others."""
    return np.any([np.isin(key[rows], key[others]) for key in keys], axis=0)


def _known(corpus: Corpus, rows: Rows, *labels: Labels) -> npt.NDArray[np.bool_]:
    """Whether intent and all tags of each utterance are among all of the labels."""
    lengths = corpus.starts[rows + 1] - corpus.starts[rows]
    places_of = np.repeat(np.arange(len(rows)), lengths)
    found = np.ones(len(rows), bool)
    for some in labels:
        has_tag, has_intent = np.isin(corpus.tags, some.tags), np.isin(corpus.intents, some.intents)
        unknown = np.bincount(places_of, ~has_tag[corpus.tag_ids[word_places(corpus, rows)]], len(rows))
        found &= has_intent[corpus.intent_ids[rows]] & (unknown == 0)
    return found
