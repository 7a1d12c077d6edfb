"""The file tradeoff.json: Table 1, and the error rate against ε."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Interval, Machine, Made
from benchmarks.harness.rows.trainings import Flags, Scores


class Epsilons(TypedDict):
    """ε by the printed multiplier and by the real noise, each as zCDP and exactly."""

    claimed_zcdp: float
    claimed_exact: float
    zcdp: float
    exact: float


class SettingOfTable(TypedDict):
    """The fields of a Setting of benchmarks.harness.grid_search."""

    model: str
    task: str
    seed: int
    decay: str
    noise_multiplier: float
    clip_norm: float


class MeasuredTraining(TypedDict):
    """A training of Table 1; older ones lack some."""

    table: SettingOfTable
    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float
    validation_ser: float
    clip_fraction: float | None
    epochs: int
    utterances: int
    precision: NotRequired[str]
    epsilon: Epsilons | None
    real_share: float | None
    minutes: float


class TrainingPiece(MeasuredTraining):
    """The same as a piece of the file."""

    machine: Machine


class AttackPiece(TypedDict):
    """A piece of the file: the attack on a training that had this error rate."""

    auc: Interval
    roc: list[list[float]]
    test_ser: float


class PlaceOnFrontier(TypedDict):
    """What a point of the frontier is about; without an ε to aim at, it is plain training."""

    model: str
    task: str
    batch: int
    delta: float
    unit: str
    target: float | None


class PointPiece(Scores):
    """A piece of the file: a training of the frontier."""

    frontier: PlaceOnFrontier
    settings: Flags


class TableSettings(TypedDict, total=False):
    """What a row of Table 1 says about its trainings; plain ones have no noise."""

    epochs: int
    utterances: int
    decay: str
    tau: float | None
    layer_scaling: str
    noise_multiplier: float
    clip_norm: float
    precision: str


class TableRun(TypedDict):
    """One training of Table 1, and the attack on it."""

    seed: int
    validation_ser: float
    test_ser: float
    epsilon: Epsilons | None
    real_share: float | None
    clip_fraction: NotRequired[float | None]
    auc: Interval | None
    roc: list[list[float]] | None


class Published(TypedDict):
    """The paper's figures of a row."""

    ser: float
    auc: float
    log10_epsilon: float | None


class TableRow(TypedDict):
    """A row of Table 1."""

    model: str
    task: str
    decay: str
    settings: TableSettings
    runs: list[TableRun]
    paper: Published | None
    processor: str
    tried: int
    precisions_tried: list[str]
    is_allowed: NotRequired[bool]


class FrontierPoint(TypedDict):
    """SER at an ε, for one unit of clipping."""

    unit: str
    target: float
    epsilon: float
    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float


class Frontier(TypedDict):
    """SER against ε for units of every size."""

    model: str
    task: str
    batch: int
    delta: float
    epochs: int
    utterances: int
    layers: int
    hidden: int
    useless: float
    seed: int
    command: str
    plain: dict[str, float] | None
    points: list[FrontierPoint]


class Tradeoff(Made):
    """The file tradeoff.json."""

    is_complete: NotRequired[bool]
    delta: float
    micro_batches: int
    layer_scaling: NotRequired[str]
    table: list[TableRow]
    frontier: Frontier | None
