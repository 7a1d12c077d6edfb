"""The file epoch_time.json: epochs, memory, and the cost of a step on more workers."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Machine, Made, Peak


class TimedEpoch(TypedDict):
    """An epoch of one contender."""

    seconds: float
    spread: list[float]
    ratio: float
    ratio_spread: list[float]
    measured_steps: int
    repetitions: int
    is_extrapolated: bool


class EpochRow(TypedDict):
    """The epochs of all contenders over one corpus."""

    model: str
    corpus: str
    is_peer: bool
    changes: str
    parameters: int
    utterances: int
    steps: int
    processor: str
    paper: dict[str, float] | None
    contenders: dict[str, TimedEpoch]


class PeakMemory(TypedDict):
    """Of a worker."""

    model: str
    is_peer: bool
    contender: str
    peak_mib: float
    ratio: float


class EpochJob(TypedDict, total=False):
    """What workers are told to measure: times, memory, or the parts of a step.

    The first entries say over which batches, the others are those of one or another measurement.
    """

    model: str
    task: str
    examples: int
    data: str | None
    batch: int
    what: str
    is_peer: bool
    passes: int
    most: int | None
    parts: int
    part: int
    contender: str
    rounds: int


class AboutEpoch(TypedDict):
    """What a piece with times is about."""

    model: str
    corpus: str
    is_peer: bool


class AboutMemory(TypedDict):
    """What a piece with a peak of memory is about."""

    model: str
    is_peer: bool
    contender: str


class AboutParts(TypedDict):
    """What a piece with the parts of a step is about."""

    model: str
    workers: int


class TimedParts(TypedDict):
    """Milliseconds of steps and of their parts."""

    parameters: int
    whole_ms: dict[str, float]
    parts_ms: dict[str, float]


class MeasuredParts(TimedParts):
    """A piece of epoch_time.json: the same on some number of workers."""

    about: AboutParts
    machine: Machine


class MeasuredMemory(Peak):
    """A piece of epoch_time.json: the memory of a worker."""

    about: AboutMemory


class Portions(TypedDict):
    """Seconds of a step, and ratios to SGD on the same steps, for each pass or part of one."""

    steps: int
    passes: int
    step_seconds: list[float]
    ratios: list[float]


class TimedSteps(TypedDict):
    """What workers measured over an epoch or a part of it."""

    parameters: int
    utterances: int
    steps: int
    times: dict[str, Portions]


class MeasuredEpoch(TimedSteps):
    """A piece of epoch_time.json: what the workers measured, and what it is about."""

    about: AboutEpoch
    machine: Machine


class CheckedStep(TypedDict):
    """A step as measured, and as the cost model has it."""

    workers: int
    contender: str
    ms: float
    predicted_ms: float


class PredictedStep(TypedDict):
    """A step with more workers."""

    workers: int
    sgd_ms: float
    edp_ms: float
    ratio: float


class CostModel(TypedDict):
    """The parts of a step, and what follows from them."""

    parameters: int
    parts_ms: dict[str, float]
    text: str
    measured: list[CheckedStep]
    predicted: list[PredictedStep]


class EpochTime(Made):
    """The file epoch_time.json."""

    is_complete: NotRequired[bool]
    missing: NotRequired[list[str]]
    workers: int
    batch: int
    names: dict[str, str]
    rows: list[EpochRow]
    memory: list[PeakMemory]
    cost_model: dict[str, CostModel]
