"""What a model remembers of its canaries; `python -m mia.audit run` makes an ε of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from mia.views import view
from tasks.nlu import canaries
from tasks.nlu.corpus import Corpus
from tasks.nlu.run_folder import check_ended, load


def canary_scores(folder: str | Path, device: str = "cpu") -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The log-probability of each canary of a run, higher if it was trained on, and whether it was.

    Args:
        folder: a run folder of ``tasks.train --canaries N``.
        device: where to compute.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no run folder {folder}")
    if not (folder / canaries.FILE).exists():
        raise ValueError(f"{folder} has no canaries: train with --canaries N")
    parts, found = load(folder), canaries.load(folder)
    check_ended(folder)
    seen = view(parts, Corpus(one.said for one in found), np.arange(len(found)), device)
    return seen.log_probabilities, np.array([one.inside for one in found], bool)
