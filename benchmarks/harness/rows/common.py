"""What the files of all benchmarks share."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired


class Machine(TypedDict, total=False):
    """What figures depend on: the processor, and the versions of packages.

    Where figures are from several machines, a value has those of all of them.
    """

    processor: str
    cores: int
    python: str
    torch: str
    horovod: str
    transformers: str
    opacus: str
    dp_accounting: str
    numpy: str
    edpsgd: str
    scipy: str


class Made(TypedDict):
    """How figures came about; older files lack some of it."""

    command: NotRequired[str]
    minutes: NotRequired[float]
    machine: NotRequired[Machine]
    seed: NotRequired[int]


class Peak(TypedDict):
    """Memory of a worker that does nothing else, at its peak."""

    peak_mib: float


class Interval(TypedDict):
    """An estimate with its bounds."""

    value: float
    low: float
    high: float
