"""The data of a job: a corpus, its parts, and canaries if there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.nlu import canaries, generator, readers
from tasks.nlu.canaries import Canary
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import Corpus
from tasks.nlu.labels import Labels
from tasks.nlu.splits import Split, split


@dataclass(frozen=True)
class Data:
    """A corpus.

    Attributes:
        corpus: all utterances, canaries at the end.
        rows: which are for training, validation and test; none is empty.
        canaries: trained on, or blank.
    """

    corpus: Corpus
    rows: Split
    canaries: Sequence[Canary]

    def without_canaries(self) -> Split:
        """The rows that are real data."""
        return replace(self.rows, train=self.rows.train[: len(self.rows.train) - len(self.canaries)])

    def blanks(self) -> frozenset[int]:
        """The canaries that are not trained on, by their places among the training utterances.

        They are drawn like all others, and then left out.
        """
        first = len(self.rows.train) - len(self.canaries)  # canaries stand last
        places = enumerate(self.canaries, start=first)
        return frozenset(place for place, one in places if not one.inside)


def load(config: Config, folder: Path | None, seed: int) -> Data:
    """The corpus that the settings name, its split and its canaries.

    Args:
        config: the settings.
        folder: a run folder, whose canaries are taken; None for a new run, which gets new ones.
        seed: of new canaries.
    """
    corpus = read(config)
    rows = split(corpus, config.split, config.split_seed)
    sizes = {name: len(part) for name, part in vars(rows).items()}
    if min(sizes.values()) == 0:
        found = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise ValueError(f"{len(corpus)} utterances are too few to train, validate and test on: {found}")
    if config.canaries == 0:
        return Data(corpus, rows, ())
    if folder is None:  # a new run
        added = canaries.make(config.canaries, Labels.of_rows(corpus, rows.train), seed)
    else:
        added = canaries.load(folder)
    return Data(*canaries.add(added, corpus, rows), added)


def read(config: Config) -> Corpus:
    """The corpus alone."""
    if config.task == "generated":
        found = Corpus(generator.utterances(config.examples, config.data_seed, config.domain_names))
    else:
        found = readers.read(config.task, config.data or "", config.skip_bad_lines)
    return found if config.longest is None else found.shorter(config.longest)
