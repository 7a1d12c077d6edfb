"""What a ledger holds: plain data, which the optimizer writes and the accountant reads."""

from __future__ import annotations

from dataclasses import dataclass


class LedgerError(ValueError):
    """A ledger that cannot be read, does not belong to the run, or holds what cannot be accounted together."""


class LedgerUnavailable(LedgerError, OSError):
    """A ledger that takes no more entries: closed, of another process, or with a file that is gone."""


@dataclass
class Event:
    """One entry.

    Attributes:
        kind: "gradients" (steps of training) or "layer_norms" (scales measured in a first step).
        epoch: what set_epoch said, None if it was not called.
        noise_multiplier: noise std over sensitivity, the smallest in the event; 0 means that no noise covers it,
            None that nothing was released yet.
        steps: how many steps were released or, before a crash, reserved.
        batching: who says what the steps have in common. "shuffled": a sampler vouches that no example is in two of
            them. "poisson": a sampler vouches that every example joins each with probability ``sampling_rate``.
            "fixed_size": a sampler vouches that each has a share ``sampling_rate`` of all units, drawn without
            replacement. "unvouched": as shuffled, by the user's word.
        sampling_rate: of Poisson sampling and of rounds of a fixed size.
    """

    kind: str
    epoch: int | None
    noise_multiplier: float | None = None
    steps: int = 0
    batching: str = "unvouched"
    sampling_rate: float | None = None


def family(batching: str) -> str:
    """Batches of one family speak of the same neighbours, and can be accounted together."""
    return "shuffled" if batching == "unvouched" else batching
