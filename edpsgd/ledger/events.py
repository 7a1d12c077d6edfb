"""The entries of a ledger: plain data, which the optimizer writes and the accountant reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

KINDS = ("gradients", "layer_norms")
_MOST_STEPS = 2**53


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
        batching: how examples were assigned to the steps. "shuffled": no example is in two of them. "poisson": every
            example joins each with probability ``sampling_rate``. "fixed_size": each has a share ``sampling_rate`` of
            all units, drawn without replacement. For these a sampler of this package made the batches, and the
            optimizer saw that the steps are its own. "unvouched": as "shuffled", but no sampler made the batches, so
            that this is an assumption of the user's.
        sampling_rate: of Poisson sampling and of rounds of a fixed size.
    """

    kind: str
    epoch: int | None
    noise_multiplier: float | None = None
    steps: int = 0
    batching: str = "unvouched"
    sampling_rate: float | None = None

    @classmethod
    def parse(cls, data: object) -> Event:
        """An event from the JSON of a file; a LedgerError says which of its values cannot be one."""
        if not isinstance(data, Mapping) or {"kind", "epoch"} - data.keys():
            raise LedgerError("an event must have a kind and an epoch")
        unknown = data.keys() - {item.name for item in fields(cls)}
        if unknown:
            raise LedgerError(f"an event has {len(unknown)} values that this version does not know")
        event = cls(**data)
        is_possible = {
            "kind": event.kind in KINDS,
            "epoch": event.epoch is None or is_int(event.epoch),
            "noise_multiplier": event.noise_multiplier is None or is_noise(event.noise_multiplier),
            "steps": is_int(event.steps) and 0 <= event.steps <= _MOST_STEPS,
            "batching": isinstance(event.batching, str) and event.batching.isprintable(),
            "sampling_rate": event.sampling_rate is None or _is_number(event.sampling_rate, 1.0),
        }
        wrong = [name for name, can_be in is_possible.items() if not can_be]
        if wrong:
            raise LedgerError(f"an event has {' and '.join(wrong)} that no run can have written")
        return event


def is_noise(value: object) -> bool:
    """Whether it can be a noise multiplier: finite, and not negative."""
    return _is_number(value, math.inf)


def _is_number(value: object, most: float) -> bool:
    """Whether it is a finite number from 0 to ``most``, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and 0 <= value <= most
    except OverflowError:  # an int beyond all floats
        return False


def is_int(value: object) -> bool:
    """Whether it is a whole number; for Python, True is one too."""
    return isinstance(value, int) and not isinstance(value, bool)


def family(batching: str) -> str:
    """Which events can be accounted together, as they have the same neighbours: a value of ``Event.batching``."""
    return "shuffled" if batching == "unvouched" else batching
