"""Whom an attack is about: members and non-members of a run's training set, without those that would spoil it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tasks.config import Config, read_file
from tasks.corpus import Corpus
from tasks.data import Data
from tasks.data import load as load_data
from tasks.examples import Labels, Rows, places
from tasks.run import Parts, has_ended, load
from tasks.splits import forms


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
    if not has_ended(folder):
        raise ValueError(f"the training of {folder} has not ended: go on with tasks.train --resume {folder}")
    config = Config(**read_file(folder / "config.yaml"))
    config = config if data is None else replace(config, data=data)
    found = load_data(config, folder, seed=0)
    facts = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    if any(facts[name] != len(part) for name, part in vars(found.rows).items()):
        raise ValueError(f"the data are not those of the run {folder}: it had other numbers of utterances")
    return Run(folder, config, int(facts.get("workers", 1)), parts, found)


@dataclass(frozen=True)
class Candidates:
    """Utterances that may have been trained on.

    Attributes:
        rows: of the corpus.
        members: which of them were trained on.
        population: other rows that were not trained on, for attacks that compare with them.
        near_duplicates: how many were left out because members and non-members have the same form.
        unknown_labels: how many because the model has no number for their labels.
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
    drawn = np.concatenate([inside, outside])
    form, members = forms(corpus)[drawn], np.arange(2 * size) < size
    is_near = np.isin(form, np.intersect1d(form[members], form[~members]))
    is_unknown = ~_known(corpus, drawn, labels) & ~is_near
    kept = ~is_near & ~is_unknown
    if not members[kept].any() or members[kept].all():
        raise ValueError(
            f"of {size} members and {size} non-members none are left on one side: {int(is_near.sum())} are near "
            f"duplicates of each other, {int(is_unknown.sum())} have labels unknown to the model"
        )
    others = np.setdiff1d(np.concatenate([rows.validation, rows.test]), outside)
    others = others[_known(corpus, others, labels)]
    return Candidates(drawn[kept], members[kept], others, int(is_near.sum()), int(is_unknown.sum()))


def _known(corpus: Corpus, rows: Rows, labels: Labels) -> npt.NDArray[np.bool_]:
    """Whether intent and all tags of each utterance have a number in the model."""
    tags, intents = (np.isin(np.array(have, object), np.array(known, object)) for have, known in (
        (corpus.tags, labels.tags), (corpus.intents, labels.intents)))  # fmt: skip
    lengths = corpus.starts[rows + 1] - corpus.starts[rows]
    unknown = np.bincount(
        np.repeat(np.arange(len(rows)), lengths), ~tags[corpus.tag_ids[places(corpus, rows)]], len(rows)
    )
    return np.asarray(intents[corpus.intent_ids[rows]] & (unknown == 0))
