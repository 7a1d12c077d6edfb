"""Gradients of many units in one backward pass: each unit's norm, and their weighted sum.

A unit is an example, or a group of examples. The losses' gradient flows once through the graph that
the forward pass recorded, whatever the model is made of. On its way the output gradients of those
operations are kept that take a parameter. With the activations that autograd saved they give norms
and weighted sums, without a gradient for each unit. The model itself is not touched.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from edpsgd.per_example.comparison import Comparison
from edpsgd.per_example.layout import Units, make_units
from edpsgd.per_example.nonfinite import IsolatedUnits, isolate_broken_units
from edpsgd.per_example.precision import exact
from edpsgd.per_example.results import BatchGradients

# One step of so many is checked by some worker, beside the first ones: the others wait for it.
SELDOM = 64


class UnitGradients:
    """Norms and weighted sums of the gradients of single examples, or of groups, for any model.

    An example's loss must not depend on other examples. Which rows of an operation belong to which
    example is found out for each batch from its own graph. What has no rule, or rows of several
    examples, is left to autograd, one unit at a time, with a warning. On batches 1, 2, 4, 8 and so
    on, on some at random, and whenever an operation is new, a random mixture of all units, or of
    some in half precision, is also compared with plain autograd, and the norms of some with
    gradients made of their own rows. A layer that does not agree at first is left to autograd. One
    that agreed before is an error, since batches that were not compared may have been wrong.

    Args:
        parameters: the trained ones, by name.
        workers: how many train together, and share the checks at random.
        verifies_all: whether to compare all batches, all norms, and the sums that are made of them.

    Attributes:
        has_shared_rows: whether gradients of several examples reached the same rows in the last
            batch.
        has_uncompared: whether a layer of the last batch could not be compared, since NaN or
            infinities of some examples are in autograd's sums over all of them.

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

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        workers: int = 1,
        verifies_all: bool = False,
    ) -> None:
        if not parameters:
            raise ValueError("parameters must have at least one entry, got none")
        if len({id(parameter) for parameter in parameters.values()}) < len(parameters):
            raise ValueError("parameters must have one name each, got a tensor under two names")
        self._parameters = dict(parameters)
        self._comparison = Comparison(self._parameters, verifies_all)
        self._seldom = SELDOM * workers
        self._batches = 0
        self.has_shared_rows = False
        self._batch: BatchGradients | None = None
        self._isolated: IsolatedUnits | None = None
        self._norms = torch.empty(0)
        self._has_batch = False

    @property
    def has_uncompared(self) -> bool:  # noqa: D102 (among the attributes of the class)
        return self._comparison.has_uncompared

    def backward(
        self,
        losses: torch.Tensor,
        units: torch.Tensor | None = None,
        count: int | None = None,
    ) -> torch.Tensor:
        """Goes through the graph once, for the mean loss of each unit.

        ``.grad`` of the parameters stays as it is.

        Args:
            losses: one for each example.
            units: the number of each example's unit; None if each example is its own.
            count: how many units there are, as some may be empty; None for the largest number plus
                one.

        Returns:
            Norms, units x layers, in the order of ``parameters``; 0 where a unit has no gradient.
        """
        groups = make_units(losses, units, count)
        self.release()
        self._comparison.has_uncompared = False
        if len(losses) == 0:
            self._has_batch = True
            return torch.zeros((groups.count, len(self._parameters)), device=losses.device)
        with _without_autocast(losses.device):
            return self._backward(exact(losses), groups)

    def _backward(self, losses: torch.Tensor, units: Units) -> torch.Tensor:
        shares = units.sizes()[units.of_examples].to(losses)
        weights = torch.ones_like(losses, requires_grad=False) / shares
        batch, norms = self._comparison.compute(losses, weights, units, self._is_comparison_due())
        self.has_shared_rows = bool(batch.shared)
        self._batch, self._norms, self._has_batch = batch, norms, True
        self._isolated = isolate_broken_units(batch, losses, units, norms)
        return norms

    def _is_comparison_due(self) -> bool:
        """Whether it is the turn of this batch: often at first, later seldom and by chance."""
        self._batches += 1
        is_power_of_two = self._batches & (self._batches - 1) == 0
        if self._comparison.verifies_all or is_power_of_two:
            return True
        return secrets.randbelow(self._seldom) == 0

    def add_weighted_(self, sums: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Adds the units' gradients, each times its factor, to ``sums``.

        A unit with a norm that is not finite adds nothing.

        Args:
            sums: a tensor for each layer, in the order of ``parameters``.
            factors: one for each unit, or units x layers.
        """
        if not self._has_batch:
            raise RuntimeError("add_weighted_() comes after backward() and before release()")
        if self._batch is None:  # it had no examples
            return
        with _without_autocast(factors.device):
            if self._comparison.verifies_all:
                isolated = [] if self._isolated is None else list(self._isolated.norms)
                self._comparison.add_compared_(self._batch, self._norms, isolated, sums, factors)
            else:
                self._batch.add_weighted_(sums, factors)
            if self._isolated is not None:
                self._isolated.add_weighted_(sums, factors)

    def release(self) -> None:
        """Forgets the batch; what was learned about the model stays."""
        self._batch, self._isolated, self._has_batch = None, None, False


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    """Norms need the precision that their tensors have, wherever backward is called."""
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        yield
