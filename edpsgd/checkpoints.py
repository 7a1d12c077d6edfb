"""What a checkpoint holds of a PrivateOptimizer, and how training goes on from it.

The state of the wrapped optimizer is beside it.

Never the state of a random generator; the seed only if one was given (privacy.md section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edpsgd.bookkeeping import Bookkeeping, run_record
from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.mechanism.settings import Settings

FORMAT = 1


@dataclass
class Progress:
    """How far a training has come.

    Attributes:
        epoch: what set_epoch said last, None before.
        steps: how many steps have used their noise, also if they failed.
        scales: of the layers by name, as the first step measured them; None if it did not.
        discarded: how many units, over all workers, held NaN or infinities and counted as zero.
    """

    epoch: int | None = None
    steps: int = 0
    scales: dict[str, float] | None = None
    discarded: int = 0


def make_state(progress: Progress, settings: Settings, bookkeeping: Bookkeeping) -> dict[str, Any]:
    """The optimizer's own part of a checkpoint, JSON-ready."""
    state = {
        "format": FORMAT,
        "epoch": progress.epoch,
        "step": progress.steps,
        "scales": progress.scales,
        "discarded": progress.discarded,
        "clip_norm": float(settings.clip_norm),
        **bookkeeping.state_dict(),
    }
    if settings.seed is not None:
        state["seed"] = settings.seed
    return state


def check_format(state: dict[str, Any]) -> None:
    """Refuses the state of a version that writes it otherwise."""
    if state.get("format") != FORMAT:
        raise ValueError(f"the state has format {state.get('format')!r}, this version reads {FORMAT}")


def restore(
    state: dict[str, Any],
    settings: Settings,
    bookkeeping: Bookkeeping,
    collective: Collective,
    has_released: bool,
) -> tuple[Settings, Progress]:
    """Lets the bookkeeping go on from a state.

    One that does not fit is refused before anything changes.

    Args:
        state: of ``make_state``; that of a copy holds the copy's number.
        settings: of the optimizer so far.
        bookkeeping: of the optimizer.
        collective: the workers.
        has_released: whether the optimizer has taken a step of its own before.

    Returns:
        The settings, with the seed and the clip norm of the state; and the progress.
    """
    bookkeeping.load_state_dict(state)
    was_seeded = settings.seed is not None
    settings = replace(settings, seed=state.get("seed", settings.seed))
    clip_norm = state.get("clip_norm", settings.clip_norm)
    if clip_norm != settings.clip_norm:
        settings = replace(settings, clip_norm=clip_norm)
        # If nothing was released under the clip norm so far, this change follows no data.
        flags = {} if has_released else {"clip_norm_restored": True}
        bookkeeping.note({**settings.describe(), **flags})
    run = run_record(settings, bookkeeping.batches, collective.size)
    if settings.seed is not None and not was_seeded:
        bookkeeping.ledger.begin_branch(run, "seeded")
    if "copy" in state:
        # What the copy releases is no part of the original's history.
        if collective.size == 1:
            bookkeeping.ledger.begin_run(run)
        else:
            bookkeeping.ledger.begin_branch(run, f"copy {state['copy']}")
    bookkeeping.resume()
    return settings, Progress(state["epoch"], state["step"], state["scales"], state["discarded"])


def load_from_root(
    root: int,
    collective: Collective,
    bookkeeping: Bookkeeping,
    own_state: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """For hvd.broadcast_optimizer_state(): all workers load the state of the root, or all of them fail.

    Args:
        root: the rank of the worker whose state is loaded.
        collective: the workers.
        bookkeeping: of this worker.
        own_state: of this worker.
        load: loads a state.
    """
    answers = collective.gather((own_state, bookkeeping.moves))
    # Samplers that were moved a different number of times would not draw alike.
    bookkeeping.moves = max(moves for _, moves in answers)
    state_of_root, _ = answers[root]
    consensus.together(collective, lambda: load(state_of_root))
