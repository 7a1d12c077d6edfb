"""A run folder before training: a new one, or that of a run that goes on, whose ledger must be whole."""

from __future__ import annotations

import time
from pathlib import Path

from edpsgd import Ledger, LedgerError, Selection, files
from edpsgd.ledger import guarantee
from tasks.common import checkpoints, progress
from tasks.common.workers import Workers

WEIGHTS, LEDGER = "weights.safetensors", "ledger.jsonl"


def new_folder(output: str | None, name: str, team: Workers) -> Path:
    """The path of a new run's folder, which holds no run yet; worker 0 says where."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    proposals = team.collective.gather(output or f"runs/{name}-{stamp}")
    folder = Path(proposals[0])  # the workers' clocks may differ
    team.on_first(lambda: _check_unused(folder))
    return folder


def _check_unused(folder: Path) -> None:
    """The configuration is the last that is written before training, and the ledger the first in it."""
    if (folder / "config.yaml").exists():
        raise ValueError(f"{folder} holds a run: go on with --resume {folder}, or name another --output")
    if any((folder / name).exists() for name in (WEIGHTS, LEDGER)):
        raise ValueError(f"{folder} holds weights or a ledger without a config.yaml: name another --output")


def open_again(folder: Path, has_ledger: bool) -> None:
    """Checks the folder of a run that goes on.

    Nothing in it makes the run wait, nobody else can read it, and its ledger is whole.
    """
    files.check_tree(folder)
    files.make_private(folder, with_content=True)
    if has_ledger:
        _check_ledger(folder)


def selection_of(folder: Path) -> Selection | None:
    """How the run was chosen among others, as its ledger says; None if it was not."""
    path = folder / LEDGER
    return guarantee.selection_of(Ledger.read(path).runs) if path.exists() else None


def _check_ledger(folder: Path) -> None:
    """Refuses a ledger with fewer steps than other files of the run know of.

    Every step is in the ledger before it is taken, so that something is missing there.
    """
    path = folder / LEDGER
    ledger = Ledger.read(path) if path.exists() else Ledger()
    charged = sum(event.steps for event in ledger.events if event.kind == "gradients")
    taken = max(checkpoints.last_step(folder / "checkpoints"), progress.last_step(folder))
    if charged < taken:
        raise LedgerError(
            f"{path} holds {charged} steps, and the run has taken {taken}: it was cut, deleted, or taken from an "
            "older copy. Restore it: without it nobody knows what the training has cost"
        )
