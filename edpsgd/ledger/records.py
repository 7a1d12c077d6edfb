"""What a ledger says of a run: its settings, its sampler, and what it did that ε depends on.

A record is data: it is written as JSON, compared between workers, and read by conditions, card and
planning. None means that something was not recorded or, where None is a setting, that it was not
set. A new setting of PrivateOptimizer is a new field here. A new condition of ε that any worker may
cause is a mark: a flag of the record that any worker may set, and that the workers tell each other
in the step's message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from edpsgd.ledger.events import LedgerError, is_int
from edpsgd.ledger.selection import Selection
from edpsgd.ledger.typed_record import (
    CHOICE,
    TypedRecord,
    constructor_arguments,
    has_type,
    is_nested_too_deep,
    refusal,
)
from edpsgd.mechanism.layer_scales import FirstStepNorms

_OLD_CHANGE = ", changed"  # what ids of changed runs ended in, before `changes` said so
_OLD_SCALES = re.compile(r"FirstStepNorms\((?:noise_multiplier=)?(?P<multiplier>[\w.+-]*)\)")

# A flag that any worker may set, and that is then a condition of ε for all.
_MARK = {"is_mark": True}

Scales = Mapping[str, float] | FirstStepNorms


@dataclass(frozen=True, kw_only=True)
class BatchesRecord(TypedRecord):
    """What a sampler says of itself in ``describe()``.

    Attributes:
        kind: "shuffled", "poisson" or "fixed_size".
        examples: or users: how many there are, over all workers.
        micro_batches: of a worker in a step; None if each example of the draw is one.
        together: whether all batches of a step come as one.
        seeded: whether its draws follow from a given seed.
        order_compared: whether the workers were seen to have the same data in the same order.
        slots: "drawn" if worker and micro-batch of an example are drawn too, and do not follow from
            its index.
        cohort: users in a round of a fixed size.
        weights: of a user, in words.
        denominator: what a sum over users is divided by, in words.
        follows_draw: whether the denominator follows the users that were drawn.
    """

    kind: str | None = None
    examples: int | None = None
    micro_batches: int | None = field(default=None, metadata=CHOICE)
    steps_per_epoch: int | None = None
    together: bool | None = None
    seeded: bool | None = None
    order_compared: bool | None = None
    sampling_rate: float | None = None
    slots: str | None = None
    batch_size: int | None = None
    cohort: int | None = None
    weights: str | None = None
    denominator: str | None = None
    follows_draw: bool | None = None

    @classmethod
    def from_settings(cls, settings: object) -> BatchesRecord:
        """A record of what ``describe()`` of a sampler says, or of the JSON of a file."""
        if not isinstance(settings, Mapping):
            raise LedgerError("the batches of a run must have names and values")
        return cls(**constructor_arguments(cls, settings))

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return self._recorded()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_settings, (self.to_json(),)


@dataclass(frozen=True, kw_only=True)
class RunRecord(TypedRecord):
    """The settings of a run, under the names of PrivateOptimizer's arguments, and what it did.

    Attributes:
        id: of the run; workers of one run share it.
        noise_decay: how the multiplier falls, in words.
        layer_scaling: given scales by parameter, or how they were measured.
        seeded: whether the noise follows from a given seed.
        sensitivity: of the sum of clipped gradients, in the units of ``clip_norm`` (privacy.md section 2).
        batches: of the sampler; None if there was none.
        selection: if the run is one of a random number, of which the best is released.
        one_pass: whether examples were clipped in one backward pass.
        loss_scaling: whether a GradScaler scaled the losses.
        clip_fraction_read: whether the share of clipped units was read.
        shared_rows: whether gradients of several examples reached the same rows of a layer, and
            check_losses was not run.
        wrong_gradients: whether gradients of single examples were found to be wrong.
        uncompared: whether some gradients could not be compared with autograd.
        clip_norm_restored: whether a checkpoint set the clip norm, and nothing was released before
            under another one.
        changes: the id of the record that this one goes on from, with some settings changed.
        begins_after: how many events there were, and steps in all of them, when it was written.

    Example:
        >>> run = RunRecord.parse({"id": "a", "workers": 2, "noise_multiplier": 1.0})
        >>> run.workers
        2
    """

    id: str = ""
    workers: int | None = None
    clip_norm: float | None = None
    noise_multiplier: float | None = None
    noise_decay: str | None = field(default=None, metadata=CHOICE)
    clipping: str | None = None
    unit: str | None = None
    layer_scaling: Scales | None = field(default=None, metadata=CHOICE)
    noise: str | None = None
    noise_placement: str | None = None
    divisor: float | None = field(default=None, metadata=CHOICE)
    compression: str | None = field(default=None, metadata=CHOICE)
    verify: str | None = None
    seeded: bool | None = None
    sensitivity: float | None = None
    batches: BatchesRecord | None = field(default=None, metadata=CHOICE)
    selection: Selection | None = None
    one_pass: bool = field(default=False, metadata=_MARK)
    loss_scaling: bool = field(default=False, metadata=_MARK)
    clip_fraction_read: bool = field(default=False, metadata=_MARK)
    shared_rows: bool = field(default=False, metadata=_MARK)
    wrong_gradients: bool = field(default=False, metadata=_MARK)
    uncompared: bool = field(default=False, metadata=_MARK)
    clip_norm_restored: bool = False
    changes: str | None = None
    begins_after: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.begins_after is not None:
            _check_place(self.begins_after)
        if isinstance(self.layer_scaling, Mapping):
            _check_scales(self.layer_scaling)
            object.__setattr__(self, "layer_scaling", MappingProxyType(dict(self.layer_scaling)))

    @property
    def has_several_workers(self) -> bool:
        """Whether more than one worker took part; of old runs, nobody knows."""
        return self.workers is not None and self.workers > 1

    @property
    def has_raw_scales(self) -> bool:
        """Whether layer scales were measured without noise."""
        return self.layer_scaling == FirstStepNorms()

    @classmethod
    def parse(cls, data: object) -> RunRecord:
        """A record from the JSON of a file; a LedgerError says what no run can have written."""
        if not isinstance(data, Mapping) or not isinstance(data.get("id"), str):
            raise LedgerError("a run must have settings and an id")
        return cls.from_settings(data)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RunRecord:
        """A record of settings in a dictionary, of a run that may have no id yet."""
        if is_nested_too_deep(settings):
            raise LedgerError("the settings of a run are nested too deep")
        arguments = constructor_arguments(cls, _upgraded(settings))
        arguments["layer_scaling"] = _scales(arguments.get("layer_scaling"))
        if arguments.get("batches") is not None:
            arguments["batches"] = BatchesRecord.from_settings(arguments["batches"])
        if "selection" in arguments:
            arguments["selection"] = Selection.from_settings(arguments["selection"])
        if isinstance(arguments.get("begins_after"), list):
            arguments["begins_after"] = tuple(arguments["begins_after"])
        return cls(**arguments)

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data, which ``parse`` reads; alike on all workers whose records are."""
        data = self._recorded()
        if isinstance(self.layer_scaling, FirstStepNorms):
            data["layer_scaling"] = self.layer_scaling.describe()
        elif self.layer_scaling is not None:
            data["layer_scaling"] = dict(self.layer_scaling)
        if self.batches is not None:
            data["batches"] = self.batches.to_json()
        if self.selection is not None:
            data["selection"] = self.selection.to_json()
        if self.begins_after is not None:
            data["begins_after"] = list(self.begins_after)
        return data

    def settings(self) -> dict[str, Any]:
        """The settings as JSON-ready data, without what says where the run stands among others."""
        data = self.to_json()
        for name in ("id", "changes", "begins_after"):
            data.pop(name, None)
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_settings, (self.to_json(),)


# In the order in which the record declares them: each is a bit of a byte in the step's message.
MARKS = tuple(item.name for item in fields(RunRecord) if "is_mark" in item.metadata)


def _upgraded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in today's form, also those that versions up to 0.1.0 wrote.

    They had scales to measure as Python prints them, and ids say which record goes on from which.
    """
    upgraded = dict(settings)
    scaling, run_id = upgraded.get("layer_scaling"), upgraded.get("id")
    if isinstance(scaling, str):
        upgraded["layer_scaling"] = _measured_scales(scaling)
    if isinstance(run_id, str) and run_id.endswith(_OLD_CHANGE):
        upgraded.setdefault("changes", run_id.removesuffix(_OLD_CHANGE))
    return upgraded


def _measured_scales(printed: str) -> dict[str, bool | float | None]:
    """What ``FirstStepNorms.describe()`` says today, of scales as version 0.1.0 printed them."""
    found = _OLD_SCALES.fullmatch(printed)
    if found is None:
        raise refusal("layer_scaling")
    multiplier = found["multiplier"]
    try:
        number = None if multiplier in ("", "None") else float(multiplier)
    except ValueError:
        raise refusal("layer_scaling") from None
    return {"measured": True, "noise_multiplier": number}


def _scales(data: Any) -> Any:
    """How scales are measured, if it is what ``FirstStepNorms.describe()`` says; else the data."""
    if not isinstance(data, Mapping) or data.get("measured") is not True:  # given ones are numbers
        return data
    multiplier = data.get("noise_multiplier")
    is_known = data.keys() == {"measured", "noise_multiplier"}
    if not is_known or not has_type(multiplier, (float, type(None))):
        raise refusal("layer_scaling")
    try:
        return FirstStepNorms(multiplier)
    except (ValueError, OverflowError):
        raise refusal("layer_scaling") from None


def _check_place(place: tuple[int, ...]) -> None:
    """Refuses a ``begins_after`` that is not a number of events and one of steps."""
    if len(place) != 2 or not all(map(is_int, place)):
        raise LedgerError("a run must begin after a number of events, and of steps in the last one")


def _check_scales(scales: Mapping[str, float]) -> None:
    for name, scale in scales.items():
        if not isinstance(name, str) or not has_type(scale, (float,)):
            raise refusal("layer_scaling")
