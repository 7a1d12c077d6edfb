"""The folder of a tuning, which is private but for ``best/``: what was drawn, the scores so far, and the trainings.

config.yaml (the job's settings), tuning.json (the candidates, their noise, and what was drawn of them), scores.jsonl,
trainings/ (that in work, and the best so far), and in the end best/, the run folder that may be released. What is
drawn is written before the first training begins, so that going on draws nothing anew.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from edpsgd import files
from edpsgd.ledger.events import LedgerError
from edpsgd.ledger.selection import Selection
from tasks.nlu import run_folder
from tasks.nlu.configuration import Config, write_file
from tasks.nlu.tuning import search_space
from tasks.nlu.tuning.search_space import Candidate

BEST, TRAININGS = "best", "trainings"
_ABOUT, _SCORES = "tuning.json", "scores.jsonl"


@dataclass(frozen=True)
class Tuning:
    """What is fixed before the first training.

    Attributes:
        candidates: what could be drawn.
        multipliers: the noise multiplier of each candidate's first epoch; None where nothing is charged.
        drawn: the candidate of each training, by number. How many there are is not released.
        score: what ``--score`` says, with its noise.
        selection: as JSON, for the ledgers; None where nothing is charged.
        sizes: of the parts of the corpus.
        workers: how many there are.
    """

    candidates: list[Candidate]
    multipliers: list[float | None]
    drawn: list[int]
    score: str
    selection: dict[str, Any] | None
    sizes: dict[str, int]
    workers: int

    @property
    def record(self) -> Selection | None:
        """What the ledger of each training says of the choice."""
        return None if self.selection is None else Selection.from_settings(self.selection)

    def check_same(self, sizes: Mapping[str, int], workers: int) -> None:
        """Refuses other data or workers than those that the noise was found for."""
        if self.sizes != dict(sizes):
            raise ValueError(f"the data are not those of the tuning: it had {self.sizes}, now {dict(sizes)}")
        if self.workers != workers:
            raise ValueError(f"the tuning began with {self.workers} workers, and goes on with as many; got {workers}")


class TuningFolder:
    """A tuning on disk; worker 0 writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def best(self) -> Path:
        """The run folder that may be released."""
        return self.path / BEST

    @property
    def settings(self) -> Path:
        """The settings of the best training, without data, privacy and machine."""
        return self.path / "settings.yaml"

    def training(self, number: int) -> Path:
        """The run folder of a training, while it is needed."""
        return self.path / TRAININGS / f"{number:03d}"

    def begin(self, config: Config, tuning: Tuning) -> None:
        """Writes what is fixed; whoever finds the config.yaml finds the rest."""
        files.make_private(self.path)
        files.write_text(self.path / _ABOUT, json.dumps(asdict(tuning), indent=1))
        write_file(self.path / "config.yaml", config)

    def read(self) -> Tuning:
        """What was fixed when the tuning began."""
        files.check_tree(self.path)
        try:
            tuning = Tuning(**files.read_json(self.path / _ABOUT, files.LARGE))
            _ = tuning.record
        except (OSError, ValueError, KeyError, TypeError, LedgerError) as error:
            raise ValueError(f"{self.path} is not the folder of a tuning, or damaged: {type(error).__name__}") from None
        return tuning

    # ---------------------------------------------------------------- trainings

    def has_ended(self, number: int) -> bool:
        """Whether the training has all its steps, and is only to be scored."""
        folder = self.training(number)
        return (folder / "config.yaml").exists() and run_folder.has_ended(folder)

    def clear(self, number: int) -> None:
        """Removes a training that was interrupted, as it begins again: to go on would charge steps twice."""
        shutil.rmtree(self.training(number), ignore_errors=True)
        files.make_private(self.path / TRAININGS)

    def scores(self) -> dict[int, float]:
        """The scores so far by number of the training; minus infinity for one that diverged."""
        path = self.path / _SCORES
        if not path.exists():
            return {}
        found = {}
        for line in files.read_text(path, files.LARGE).splitlines(keepends=True):
            if line.endswith("\n"):
                entry = files.parse_json(line)
                found[int(entry["training"])] = -math.inf if entry["score"] is None else float(entry["score"])
        return found

    def note(self, number: int, score: float) -> None:
        """Writes a score down, which is on disk when this returns."""
        entry = {"training": number, "score": score if math.isfinite(score) else None}
        files.append_line(self.path / _SCORES, json.dumps(entry))

    def keep_best(self) -> None:
        """Removes the trainings that were scored, but for the best."""
        scores = self.scores()
        best = best_of(scores)
        for number in scores:
            if number != best:
                shutil.rmtree(self.training(number), ignore_errors=True)

    def release(self, number: int, config: Config) -> None:
        """Gives the best training its own folder, and removes the others; again, it changes nothing.

        Args:
            number: of the best training.
            config: its settings, as they are to be read there.
        """
        source = self.training(number)
        if not self.best.exists():
            write_file(source / "config.yaml", config)
            self._write_settings(config)
            os.replace(source, self.best)
            files.sync(self.path)
        shutil.rmtree(self.path / TRAININGS, ignore_errors=True)

    def _write_settings(self, config: Config) -> None:
        """What was chosen for model and training, for other data; what is not given keeps its default."""
        names = search_space.names()
        chosen = {name: value for name, value in config.given().items() if name in names and value is not None}
        files.write_text(self.settings, yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True))


def best_of(scores: Mapping[int, float]) -> int | None:
    """The number of the best training, of equal ones the first; None if all diverged."""
    usable = {number: score for number, score in scores.items() if score > -math.inf}
    return min(usable, key=lambda number: (-usable[number], number), default=None)
