"""What the files of all benchmarks share."""

from __future__ import annotations

from typing import Any, TypedDict

from typing_extensions import NotRequired

Machine = dict[str, Any]  # processor, cores, and the version of each package


class Made(TypedDict):
    """How figures came about; older files lack some of it."""

    command: NotRequired[str]
    minutes: NotRequired[float]
    machine: NotRequired[Machine]
    seed: NotRequired[int]


class Interval(TypedDict):
    """An estimate with its bounds."""

    value: float
    low: float
    high: float
