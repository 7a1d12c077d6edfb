"""Gradients of many units in one backward pass: each unit's norm, and the sum with a factor for each unit.

A unit is an example, or a group of examples. The data gradient flows once through the graph that the forward pass
recorded, whatever the model is made of. On its way the gradients of those operations are kept that take a parameter,
and with what autograd saved of their inputs they give norms and weighted sums, without a gradient for each unit.
The model itself is not touched.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from edpsgd import tensors
from edpsgd.per_example.backward_pass import Batch
from edpsgd.per_example.errors import NOT_LINEAR_ADVICE, WrongGradients
from edpsgd.per_example.ghost import exact
from edpsgd.per_example.layout import Units
from edpsgd.per_example.nonfinite import AloneGradients, find_alone

SELDOM = 64  # one step of so many is checked by some worker, beside the first ones: the others wait for it
_NO_RULE = "there is no rule for an operation that they go into. That costs time and nothing else"
_SHARED = (
    "gradients of several examples reach the same rows of these layers. That is right where rows do not depend on the "
    "data, as with relative positions; but if a loss depends on other examples, no clipping bounds their influence. "
    "edpsgd.check_losses finds out"
)
_TOO_LATE = (
    "the gradients of single examples do not agree with autograd, though all operations of this batch did so before. "
    "Steps before this one may have been clipped wrongly, and ε does not hold for them. Use verify='always', or one "
    "backward and accumulate() for each example"
)
_NOT_LINEAR = (
    "autograd's gradients of {names} do not grow as their losses do: a hook, or a function with a backward of its own, "
    f"clamps or normalises them. {NOT_LINEAR_ADVICE}"
)
_ROUNDED = 0.3  # of a sum: what autograd may round away of it where something is in half precision
_FAR_OFF = 10  # times the tolerance: no rounding error
_NOISE = 4  # times what half precision rounds away in autograd's own sums may be rounded away in others
_FINE = 1e-2  # a tolerance below this is one of single precision


class UnitGradients:
    """Norms and weighted sums of the gradients of single examples, or of groups, for any model.

    An example's loss must not depend on other examples. Which rows of an operation belong to which example is found
    out for each batch from its own graph. What has no rule, or rows of several examples, is left to autograd, one unit
    at a time, with a warning. On batches 1, 2, 4, 8 and so on, on some at random, and whenever an operation is new, a
    random mixture of all units, or of some in half precision, is also compared with plain autograd, and the norms of
    some with gradients made of their own rows. A layer that does not agree at first is left to autograd. One that
    agreed before is an error, since batches that were not compared may have been wrong.

    Args:
        parameters: the trained ones, by name.
        workers: how many train together, and share the checks at random.
        verifies_all: whether to compare all batches, all norms, and the sums that are made of them.

    Attributes:
        has_shared_rows: whether gradients of several examples reached the same rows in the last batch.
        has_uncompared: whether a layer of the last batch could not be compared, since NaN or infinities of some
            examples are in autograd's sums over all of them.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> engine = UnitGradients(dict(model.named_parameters()))
        >>> inputs = torch.tensor([[3.0, 4.0], [0.6, 0.8]])
        >>> engine.backward(model(inputs).squeeze(1))  # norms: examples x (weight, bias)
        tensor([[5., 1.],
                [1., 1.]])
        >>> sums = [torch.zeros_like(p) for p in model.parameters()]
        >>> engine.add_weighted_(sums, torch.tensor([0.2, 1.0]))
        >>> sums[0]
        tensor([[1.2000, 1.6000]])
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], workers: int = 1, verifies_all: bool = False) -> None:
        if not parameters:
            raise ValueError("parameters must have at least one entry, got none")
        if len({id(parameter) for parameter in parameters.values()}) < len(parameters):
            raise ValueError("parameters must have one name each, got a tensor under two names")
        self._parameters, self._seldom = dict(parameters), SELDOM * workers
        self._compared: set[str] = set()  # operations of batches that agreed with autograd
        self._distrusted: set[str] = set()
        self._warned: set[str] = set()
        self._batches, self._verifies_all = 0, verifies_all
        self.has_shared_rows, self.has_uncompared = False, False
        self._batch: Batch | None = None
        self._alone: AloneGradients | None = None
        self._norms = torch.empty(0)
        self._has_batch = False

    def backward(
        self, losses: torch.Tensor, units: torch.Tensor | None = None, count: int | None = None
    ) -> torch.Tensor:
        """Goes through the graph once, for the mean loss of each unit. ``.grad`` of the parameters stays as it is.

        Args:
            losses: one for each example.
            units: the number of each example's unit; None if each example is its own.
            count: how many units there are, as some may be empty; None for the largest number plus one.

        Returns:
            Norms, units x layers, in the order of ``parameters``; 0 where a unit has no gradient.
        """
        groups = _groups(losses, units, count)
        self.release()
        self.has_uncompared = False
        if len(losses) == 0:
            self._has_batch = True
            return torch.zeros((groups.count, len(self._parameters)), device=losses.device)
        with _without_autocast(losses.device):
            return self._backward(exact(losses), groups)

    def _backward(self, losses: torch.Tensor, groups: Units) -> torch.Tensor:
        weights = torch.ones_like(losses, requires_grad=False) / groups.sizes()[groups.of_examples].to(losses)
        self._batch, norms = self._proven(losses, weights, groups)
        self._norms, self._has_batch = norms, True
        self._look_alone(self._batch, losses, groups, norms)
        return norms

    def _look_alone(self, batch: Batch, losses: torch.Tensor, groups: Units, norms: torch.Tensor) -> None:
        """Finds the units that others have broken, and writes their norms; all others that are broken are dropped."""
        is_broken = ~torch.isfinite(norms).all(1)
        if not bool(is_broken.any()):
            return
        batch.drop(is_broken)
        own = set(groups.of_examples[~torch.isfinite(losses.detach()).cpu()].tolist())
        suspects = [unit for unit in is_broken.nonzero().flatten().tolist() if unit not in own]
        if suspects and batch.may_spread and int(is_broken.sum()) > 1:  # else nobody could have broken it
            alone = AloneGradients(batch.by_autograd, groups.count)
            find_alone(alone, suspects, batch.keeps_zero)
            self._alone = alone if alone.found else None
            for unit, found in alone.found.items():
                norms[unit] = 0.0
                for number, norm in found.items():
                    norms[unit, number] = norm.to(norms)

    def add_weighted_(self, sums: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Adds the units' gradients, each times its factor, to ``sums``.

        A unit with a norm that is not finite adds nothing.

        Args:
            sums: a tensor for each layer, in the order of ``parameters``.
            factors: one for each unit, or units x layers.
        """
        if not self._has_batch:
            raise RuntimeError("add_weighted_() comes after backward() and before release()")
        if self._batch is not None:
            with _without_autocast(factors.device):
                if self._verifies_all:
                    self._add_compared_(self._batch, sums, factors)
                else:
                    self._batch.add_weighted_(sums, factors)
                if self._alone is not None:
                    self._alone.add_weighted_(sums, factors)

    def release(self) -> None:
        """Forgets the batch; what was learned about the model stays."""
        self._batch, self._alone, self._has_batch = None, None, False

    # ---------------------------------------------------------------- proof

    def _proven(self, losses: torch.Tensor, weights: torch.Tensor, groups: Units) -> tuple[Batch, torch.Tensor]:
        """Compares some batches with autograd, or all, and does without the rules that fail."""
        self._batches += 1
        is_early = self._batches & (self._batches - 1) == 0  # 1, 2, 4, 8 ...
        is_due = self._verifies_all or is_early or secrets.randbelow(self._seldom) == 0
        while True:
            batch = Batch(self._parameters, losses, weights, groups, self._distrusted, self._compared, is_due)
            norms = batch.norms()
            wrong = self._compare(batch, norms, groups) if batch.is_checked else {}
            if not wrong:
                is_compared = batch.is_checked and not self.has_uncompared and len(losses) > 1
                self._compared |= batch.kinds if is_compared else set()
                self.has_shared_rows = bool(batch.shared)
                self._warn(batch.without_rule, _NO_RULE)
                self._warn(batch.shared, _SHARED)
                return batch, norms
            if not (batch.is_new or self._verifies_all) and max(wrong.values()) > _FAR_OFF:
                raise WrongGradients(_TOO_LATE)
            names = [name for number, name in enumerate(self._parameters) if number in wrong]
            self._warn(names, "the rules for them do not agree with autograd")
            self._distrusted.update(names)

    def _compare(self, batch: Batch, norms: torch.Tensor, groups: Units) -> dict[int, float]:
        """The layers whose weighted sums, or the norms of some units, are not what autograd says; how far off.

        Layers that are distrusted are autograd's own, one unit at a time. If these do not add up, it is not linear.
        """
        names = list(self._parameters)
        wrong, not_linear = dict[int, float](), list[str]()
        for number, off, size in self._distances(batch, norms, groups):
            allowed = batch.tolerance * size
            if off <= allowed:
                continue
            if names[number] in self._distrusted:
                is_rounding = batch.has_halves and off <= _ROUNDED * size
                if batch.shows_hooks and not is_rounding:
                    not_linear.append(names[number])
                continue
            wrong[number] = max(off / allowed if allowed else math.inf, wrong.get(number, 0.0))
        if not_linear:
            raise WrongGradients(_NOT_LINEAR.format(names=", ".join(dict.fromkeys(not_linear))))
        return wrong

    def _distances(self, batch: Batch, norms: torch.Tensor, groups: Units) -> Iterator[tuple[int, float, float]]:
        """The number of a layer, how far something is from what autograd says, and how large it is."""
        random, is_finite = secrets.SystemRandom(), torch.isfinite(norms).all(1).cpu()
        present = [unit for unit in groups.present if is_finite[unit]]
        if not present:
            return
        has_broken = len(present) < len(groups.present)
        if has_broken:
            batch.drop(~is_finite.to(norms.device))
        chosen = present
        if batch.tolerance > _FINE:  # then one wrong unit would be lost among many
            chosen = random.sample(chosen, min(8, len(chosen)))
        factors = _mixing(norms, chosen)
        whole = tensors.vector_norm(norms[chosen].double() * factors[chosen].double().unsqueeze(1))
        expected = batch.by_autograd_far_off(factors)
        noise = batch.noise_of_autograd(factors) if batch.tolerance > _FINE else {}
        for number, found in batch.sums(factors):
            one = expected.pop(number, torch.zeros_like(found))
            size = tensors.vector_norm(one)
            if has_broken and not math.isfinite(size):  # autograd sums NaN of the others too, whatever their factors
                self.has_uncompared = True
                continue
            off = tensors.vector_norm(found.sub_(one)) - _NOISE * noise.get(number, 0.0)
            yield number, off if math.isnan(off) else max(0.0, off), size + 0.01 * whole
        usual = tensors.vector_norm(norms[present]) / len(present) ** 0.5
        for unit in present if self._verifies_all else random.sample(present, min(3, len(present))):
            for number, size in batch.norms_of(unit):
                too_small = max(0.0, size - float(norms[unit, number]))  # too large on purpose, where rows cancel
                yield number, too_small, size + 0.01 * usual

    def _add_compared_(self, batch: Batch, sums: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Compares the very sums that will be released; those of three layers, if each has factors of its own."""
        found, norms, layers = dict(batch.sums(factors)), self._norms.nan_to_num(0.0, 0.0), batch.numbers
        if self._alone is not None:  # these are made by autograd itself, and are not in the sums yet
            factors = factors.index_fill(0, torch.tensor(list(self._alone.found), device=factors.device), 0.0)
        columns = [(factors, layers)]
        if factors.dim() > 1:
            layers = secrets.SystemRandom().sample(layers, min(3, len(layers)))
            columns = [(factors[:, number], [number]) for number in layers]
        for column, numbers in columns:
            expected, whole = batch.by_autograd(column), tensors.vector_norm(norms * column.to(norms).unsqueeze(1))
            for number in numbers:
                one = expected.get(number, torch.zeros_like(found[number]))
                size = tensors.vector_norm(one)
                if self.has_uncompared and not math.isfinite(size):
                    continue
                allowed = batch.tolerance * (size + 0.01 * whole)
                if not tensors.vector_norm(found[number] - one) <= allowed:
                    raise WrongGradients("a clipped sum does not agree with autograd: it is not released")
        for number, one in found.items():
            sums[number].add_(one)

    def _warn(self, names: Iterable[str], reason: str) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new:
            message = f"gradients for {', '.join(new)} are computed unit by unit, which is slow: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    """Norms need the precision that their tensors have, wherever backward is called."""
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        yield


def _mixing(norms: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    """A factor for each unit with which the chosen ones count about alike, but for norms below 1/64 of the largest.

    Nobody can foresee them, and no two are the same, so that sums hardly agree unless the gradients of all chosen units
    do. Up to eight are powers of two, by which half precision scales without rounding.
    """
    random = secrets.SystemRandom()
    sizes, factors = tensors.row_lengths(norms).tolist(), [0.0] * len(norms)
    largest = max(sizes[unit] for unit in chosen)
    if len(chosen) <= 8:
        options = [sign * 2.0**-power for sign in (-1, 1) for power in range(4)]
    else:
        options = [sign * (0.125 + 0.875 * step / len(chosen)) for sign in (-1, 1) for step in range(len(chosen))]
    for unit, factor in zip(chosen, random.sample(options, len(chosen)), strict=True):
        share = max(sizes[unit] / largest, 2.0**-6) if largest else 1.0
        factors[unit] = factor * 2.0 ** -round(math.log2(share))
    return torch.tensor(factors, dtype=norms.dtype, device=norms.device)


def _groups(losses: torch.Tensor, units: torch.Tensor | None, count: int | None) -> Units:
    """The units, if all arguments are right."""
    if losses.dim() != 1 or not losses.is_floating_point():
        raise ValueError(
            f"losses must be one number for each example, got {losses.dtype} of shape {tuple(losses.shape)}"
        )
    if units is None:
        if count not in (None, len(losses)):
            raise ValueError(f"count must be the number of losses, {len(losses)}, where units is None, got {count!r}")
        return Units(None, len(losses), len(losses))
    if units.shape != losses.shape or units.dtype is not torch.int64:
        raise ValueError(f"units must be {len(losses)} int64 numbers, got {units.dtype} of shape {tuple(units.shape)}")
    numbers = units.cpu()
    least, largest = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, -1)
    if least < 0 or (count is not None and largest >= count):
        raise ValueError(f"units must lie between 0 and count - 1, got {least} to {largest} and count {count}")
    return Units(numbers, largest + 1 if count is None else count, len(losses))
