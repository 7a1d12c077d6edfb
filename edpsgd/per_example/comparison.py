"""The comparison with autograd: what the rules and their reading of the graph are trusted for.

A comparison holds a random mixture of all units (in half precision, of some) against plain
autograd, and the norms of some against gradients that are instantiated from the same rows
(``deviations``). A layer that does not agree is distrusted from then on, and left to autograd. If
all of a batch's operations agreed before, that is an error, since batches that were not compared
may have been wrong.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from edpsgd import tensors
from edpsgd.per_example.batch import compute_batch
from edpsgd.per_example.deviations import LITTLE, find_deviations
from edpsgd.per_example.errors import NOT_LINEAR_ADVICE, WrongGradients
from edpsgd.per_example.layout import Units
from edpsgd.per_example.results import BatchGradients

_NO_RULE = "there is no rule for an operation that they go into. That costs time and nothing else"
_SHARED = (
    "gradients of several examples reach the same rows of these layers. That is right where rows "
    "do not depend on the data, as with relative positions; but if a loss depends on other "
    "examples, no clipping bounds their influence. edpsgd.check_losses finds out"
)
_TOO_LATE = (
    "the gradients of single examples do not agree with autograd, though all operations of this "
    "batch did so before. Steps before this one may have been clipped wrongly, and ε does not "
    "hold for them. Use verify='always', or one backward and accumulate() for each example"
)
_WRONG_SUM = "a clipped sum does not agree with autograd: it is not released"
_NOT_LINEAR = (
    "autograd's gradients of {names} do not grow as their losses do: a hook, or a function with a "
    f"backward of its own, clamps or normalises them. {NOT_LINEAR_ADVICE}"
)
_ROUNDED = 0.3  # of a sum: what autograd may round away of it where something is in half precision
_FAR_OFF = 10  # times the tolerance: no rounding error
_SOME_LAYERS = 3


@dataclass(eq=False)
class Comparison:
    """Computes batches, and compares them with autograd.

    Attributes:
        parameters: the trained ones, by name.
        verifies_all: whether all batches are compared, all norms, and the sums that are made of
            them.
        has_uncompared: whether a layer of the last batch could not be compared, since NaN or
            infinities of some examples are in autograd's sums over all of them.
    """

    parameters: Mapping[str, torch.Tensor]
    verifies_all: bool
    has_uncompared: bool = False
    # Operations of batches that agreed with autograd.
    _agreed: set[str] = field(default_factory=set, repr=False)
    _distrusted: set[str] = field(default_factory=set, repr=False)  # names of parameters
    _warned: set[str] = field(default_factory=set, repr=False)

    def compute(
        self,
        losses: torch.Tensor,
        weights: torch.Tensor,
        units: Units,
        is_due: bool,
    ) -> tuple[BatchGradients, torch.Tensor]:
        """The gradients of a batch, and their norms, units x layers, without the rules that fail.

        Args:
            losses: one for each example.
            weights: of the losses.
            units: of the examples.
            is_due: whether the batch is compared though it holds no operation that never was.
        """
        self.has_uncompared = False
        while True:
            batch = compute_batch(
                self.parameters,
                losses,
                weights,
                units,
                self._distrusted,
                self._agreed,
                is_due or self.verifies_all,
            )
            norms = batch.norms()
            wrong = self._find_wrong_layers(batch, norms) if batch.is_compared else {}
            if not wrong:
                break
            is_first_time = batch.is_new or self.verifies_all
            if not is_first_time and max(wrong.values()) > _FAR_OFF:
                raise WrongGradients(_TOO_LATE)
            names = [name for number, name in enumerate(self.parameters) if number in wrong]
            self._warn(names, "the rules for them do not agree with autograd")
            self._distrusted.update(names)
        if batch.is_compared and not self.has_uncompared and len(losses) > 1:
            self._agreed |= batch.kinds
        self._warn(batch.without_rule, _NO_RULE)
        self._warn(batch.shared, _SHARED)
        return batch, norms

    def add_compared_(
        self,
        batch: BatchGradients,
        norms: torch.Tensor,
        isolated: Sequence[int],
        sums: Sequence[torch.Tensor],
        factors: torch.Tensor,
    ) -> None:
        """Adds a batch's weighted sums to ``sums``, if these very sums agree with autograd.

        If each layer has factors of its own, three of them are compared.

        Args:
            batch: the gradients of all units.
            norms: units x layers.
            isolated: units that autograd computes in isolation, which are not in the batch's sums.
            sums: a tensor for each layer.
            factors: one for each unit, or units x layers.
        """
        found = dict(batch.sums(factors))
        norms = norms.nan_to_num(0.0, 0.0)
        if isolated:
            factors = factors.index_fill(0, torch.tensor(isolated, device=factors.device), 0.0)
        if factors.dim() == 1:
            self._refuse_wrong_sums(batch, norms, found, factors, batch.numbers)
        else:
            count = min(_SOME_LAYERS, len(batch.numbers))
            for number in secrets.SystemRandom().sample(batch.numbers, count):
                self._refuse_wrong_sums(batch, norms, found, factors[:, number], [number])
        for number, total in found.items():
            sums[number].add_(total)

    def _refuse_wrong_sums(
        self,
        batch: BatchGradients,
        norms: torch.Tensor,
        found: Mapping[int, torch.Tensor],
        factors: torch.Tensor,
        numbers: Sequence[int],
    ) -> None:
        expected = batch.autograd.weighted(factors)
        whole = tensors.vector_norm(norms * factors.to(norms).unsqueeze(1))
        for number in numbers:
            right = expected.get(number, torch.zeros_like(found[number]))
            size = tensors.vector_norm(right)
            if self.has_uncompared and not math.isfinite(size):
                continue
            allowed = batch.tolerance * (size + LITTLE * whole)
            if not tensors.vector_norm(found[number] - right) <= allowed:
                raise WrongGradients(_WRONG_SUM)

    def _find_wrong_layers(self, batch: BatchGradients, norms: torch.Tensor) -> dict[int, float]:
        """The layers that deviate from autograd by more than rounding, and by how many tolerances.

        Layers that are distrusted are autograd's own, one unit at a time. If these do not add up,
        it is not linear.
        """
        names = list(self.parameters)
        wrong: dict[int, float] = {}
        not_linear: list[str] = []
        for deviation in find_deviations(batch, norms, self.verifies_all):
            if not deviation.is_comparable:
                self.has_uncompared = True
                continue
            allowed = batch.tolerance * deviation.size
            if deviation.distance <= allowed:
                continue
            name = names[deviation.number]
            if name in self._distrusted:
                is_rounding = batch.has_halves and deviation.distance <= _ROUNDED * deviation.size
                if batch.autograd.has_room and not is_rounding:
                    not_linear.append(name)
                continue
            tolerances = deviation.distance / allowed if allowed else math.inf
            wrong[deviation.number] = max(tolerances, wrong.get(deviation.number, 0.0))
        if not_linear:
            raise WrongGradients(_NOT_LINEAR.format(names=", ".join(dict.fromkeys(not_linear))))
        return wrong

    def _warn(self, names: Iterable[str], reason: str) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new:
            layers = ", ".join(new)
            message = f"gradients for {layers} are computed unit by unit, which is slow: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)  # UnitGradients.backward
