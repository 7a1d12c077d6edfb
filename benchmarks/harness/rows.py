"""The form of results files: what a program that reads them may rely on."""

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


# ---------------------------------------------------------------- time


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


class MeasuredParts(TypedDict):
    """Milliseconds of steps and of their parts, on some number of workers."""

    parameters: int
    whole_ms: dict[str, float]
    parts_ms: dict[str, float]
    machine: Machine


class Portions(TypedDict):
    """Seconds of a step, and ratios to SGD on the same steps, for each pass or part of one."""

    steps: int
    passes: int
    step_seconds: list[float]
    ratios: list[float]


class MeasuredEpoch(TypedDict):
    """A piece of epoch_time.json: what the workers measured, and what it is about."""

    about: dict[str, Any]
    parameters: int
    utterances: int
    steps: int
    times: dict[str, Portions]
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


class TimedStep(TypedDict):
    """Steps of one contender; three figures are quartiles."""

    milliseconds: list[float]
    ratio_to_sgd: list[float]
    ratio_with_checks: NotRequired[float | None]
    checked_ms: NotRequired[float]
    steps: int
    peak_mib: NotRequired[float | None]
    memory_ratio: NotRequired[float | None]


class StepRow(TypedDict):
    """The steps of all contenders on one shape of batches."""

    kind: str
    tokens: int
    size: int
    is_peer: bool
    parameters: int
    contenders: dict[str, TimedStep]
    parts_ms: NotRequired[dict[str, dict[str, float]]]


class StepTime(Made):
    """The file step_time.json."""

    is_complete: NotRequired[bool]
    missing: NotRequired[list[str]]
    names: dict[str, str]
    rows: list[StepRow]


# ---------------------------------------------------------------- privacy and utility


class Epsilons(TypedDict):
    """ε by the printed multiplier and by the real noise, each as zCDP and exactly."""

    claimed_zcdp: float
    claimed_exact: float
    zcdp: float
    exact: float


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
    settings: dict[str, Any]
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


class RecipeRow(TypedDict):
    """A training with single-example units, or without privacy."""

    model: str
    task: str
    epsilon: float | None
    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float
    validation_ser: float
    recipe: dict[str, Any]


class Recipes(Made):
    """The file recipes.json."""

    is_complete: NotRequired[bool]
    delta: float
    rows: list[RecipeRow]
    tried: NotRequired[list[RecipeRow]]


class UtilityRun(TypedDict):
    """A complete run folder."""

    name: str
    settings: dict[str, Any]
    metrics: dict[str, Any]
    data: dict[str, Any]


class Utility(Made):
    """The file utility.json."""

    workers: int
    runs: list[UtilityRun]


class AuditRow(TypedDict):
    """A claim, and the lower bounds that an audit found."""

    noise: str
    micro_batches: int
    clipping: str
    scaling: str | None
    claimed_mu: float
    mu: float
    claimed_epsilon: float
    epsilon: float
    is_refuted: bool


class Audits(Made):
    """The file audits.json."""

    trials: int
    delta: float
    confidence: float
    rows: list[AuditRow]


# ---------------------------------------------------------------- attacks


class AttackReport(TypedDict):
    """How well an attack tells members."""

    auc: Interval
    balanced_accuracy: Interval
    tpr_at_1_percent: Interval
    resamples: NotRequired[int]


class AttackedRun(AttackReport):
    """The paper's attack on a training of utility."""

    name: str
    model: str
    task: str
    private: str
    noise: str
    noise_multiplier: float
    decay: str
    near_duplicates: int


class Membership(Made):
    """The file membership.json."""

    by_heart: dict[str, dict[str, AttackReport]]
    corpora: list[AttackedRun]


class MemorizationRow(TypedDict):
    """A language model and the canaries that it knows."""

    tables: list[int]
    name: str
    is_iid: bool
    batch: int
    steps: int
    flags: list[str]
    test_accuracy: float
    test_perplexity: float
    seconds: float
    epsilon: NotRequired[float]
    memorised: dict[str, Any]


class Memorization(Made):
    """The file memorization.json."""

    scale: dict[str, Any]
    delta: float
    rows: list[MemorizationRow]


class CanaryRank(TypedDict):
    """One canary among random suffixes."""

    seconds: float
    processor_seconds: float
    rank: int
    exposure: float


class Exposure(Made):
    """The file exposure.json."""

    threads: int
    parameters: int
    suffixes: int
    chunk: int
    grown: int
    unseen: CanaryRank
    learned: CanaryRank


class AttackCostRow(TypedDict):
    """Seconds of prediction and of an attack's features."""

    model: str
    tags: int
    prediction: float
    features: float
    ratio: float


class AttackCost(Made):
    """The file attack_cost.json."""

    examples: int
    rows: list[AttackCostRow]


# ---------------------------------------------------------------- other costs


class AccountedEpsilon(TypedDict):
    """ε of a training, and how far it is above a finer grid."""

    noise: float
    rate: float
    epsilon: float
    seconds: float
    above: float


class Calibrated(TypedDict):
    """The noise for an ε."""

    rate: float
    noise: float
    seconds: float
    epsilon: float


class WithoutSampling(TypedDict):
    """Milliseconds of the accountant where every step has all examples of an epoch."""

    epsilon_ms: float
    epsilon_slowest_ms: float
    calibrate_ms: float


class GrowingEpsilon(TypedDict):
    """ε after each epoch: with what was composed before, and from scratch."""

    rate: float
    seconds: float
    slowest: float
    seconds_anew: float
    slowest_anew: float
    difference: float


class DpAccounting(TypedDict):
    """The same ε by dp-accounting and by edpsgd."""

    rate: float
    levels: int
    dp_accounting_epsilon: float
    dp_accounting_seconds_per_level: float
    epsilon: float
    seconds_per_level: float


class Accounting(Made):
    """The file accounting.json."""

    epsilon: list[AccountedEpsilon]
    calibration: list[Calibrated]
    without_sampling: WithoutSampling
    growth: list[GrowingEpsilon]
    dp_accounting: DpAccounting


class EpochOfData(TypedDict):
    """Seconds of an epoch, and of drawing and assembling its batches."""

    seconds: float
    data_seconds: float
    share: float


class HeldData(TypedDict):
    """Bytes of a process that holds so many utterances."""

    examples: int
    grown: int
    peak: int
    arrays: int


class LoadedData(TypedDict):
    """What data cost one model."""

    epoch: EpochOfData
    memory: list[HeldData]


class DataLoading(Made):
    """The file data_loading.json."""

    examples: int
    workers: int
    clc: LoadedData
    bert: LoadedData


class BenchRow(TypedDict):
    """Minutes of a reduced benchmark."""

    name: str
    minutes: float


class Bench(Made):
    """The file bench.json."""

    rows: list[BenchRow]
