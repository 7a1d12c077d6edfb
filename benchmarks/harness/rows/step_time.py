"""The file step_time.json: single steps."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Made


class TimedStep(TypedDict):
    """Steps of one contender; three figures are quartiles."""

    milliseconds: list[float]
    ratio_to_sgd: list[float]
    ratio_with_checks: NotRequired[float | None]
    checked_ms: NotRequired[float]
    steps: int
    peak_mib: NotRequired[float | None]
    memory_ratio: NotRequired[float | None]


class StepJob(TypedDict):
    """What a row is about: a model, the shape of a batch, and whether Opacus takes part."""

    kind: str
    tokens: int
    size: int
    is_peer: bool


class StepSettings(TypedDict):
    """What a row was measured with; those without the slowest contender do not name them."""

    rounds: int
    contenders: NotRequired[list[str]]


class MeasuredSteps(TypedDict):
    """Seconds on worker 0: of all rounds, of checked steps, and of the parts of a step."""

    parameters: int
    times: dict[str, list[float | None]]
    checks: dict[str, float]
    parts: dict[str, dict[str, float]]


class StepRow(StepJob):
    """The steps of all contenders on one shape of batches."""

    parameters: int
    contenders: dict[str, TimedStep]
    parts_ms: NotRequired[dict[str, dict[str, float]]]


class StepTime(Made):
    """The file step_time.json."""

    is_complete: NotRequired[bool]
    missing: NotRequired[list[str]]
    names: dict[str, str]
    rows: list[StepRow]
