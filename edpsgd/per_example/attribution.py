"""Follows the examples of one batch through its graph: from the losses down to every operation.

The losses belong to one example each. Each operation hands the owners of its results on to its
arguments: by what the operation means, where that decides (``operations``), or else by calling its
backward (``probing``). Nothing is kept for other batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import LEAF, Graph, argument_shapes, saved, shapes
from edpsgd.per_example.linearity import refuse_nonlinear
from edpsgd.per_example.operations import (
    BATCH_NORMS,
    EMBEDDINGS,
    Arguments,
    Results,
    argument_owners,
)
from edpsgd.per_example.owners import NOBODY, SHARED, Owners
from edpsgd.per_example.probing import Prober


@dataclass(eq=False)
class Attribution:
    """Which example each element of each node's results belongs to.

    ``attribute_examples`` makes it.

    Attributes:
        graph: of the batch.
        prober: calls the backward of single operations.
        probed: the nodes whose backward was called to find out.
    """

    graph: Graph
    prober: Prober
    probed: list[Node] = field(default_factory=list)
    _results: dict[Node, list[Owners | None]] = field(default_factory=dict, repr=False)
    _compressed: dict[int, tuple[Owners, Owners]] = field(default_factory=dict, repr=False)

    def owners(self, node: Node, output: int = 0) -> Owners:
        """Of one result, in its dimensions: of size 1 where the owners do not change."""
        found = self._results[node][output]
        return own.everywhere(NOBODY, len(shapes(node)[output])) if found is None else found

    def results(self, node: Node) -> Results:
        """Owners of all results; None where nobody used one."""
        return self._results[node]

    def is_separable(self, node: Node) -> bool:
        """Whether each element of its results belongs to one example at most."""
        return not any(own.is_shared(self.owners(node, output)) for output in self.graph.used[node])

    # ---------------------------------------------------------------- from results to arguments

    def begin_at_losses(self) -> None:
        """Each loss belongs to its own example."""
        root, output = self.graph.root
        results: list[Owners | None] = [None] * len(shapes(root))
        results[output] = torch.arange(self.graph.examples)
        self._results[root] = results

    def hand_on(self, node: Node) -> None:
        """Writes down the owners of a node's arguments; all of its consumers come before it."""
        results = self._settle(node)
        used = [owners for owners in results if owners is not None]
        if node.name() == LEAF or not used:
            return
        found = self._attribute_arguments(node, results, used)
        for (child, output), owners in zip(node.next_functions, found, strict=True):
            if child is not None and owners is not None:
                self._merge(child, output, owners)

    def _settle(self, node: Node) -> Results:
        """The owners of a node's results, which nothing changes any more, in few elements."""
        results = self._results.setdefault(node, [None] * len(shapes(node)))
        for output, (owners, shape) in enumerate(zip(results, shapes(node), strict=True)):
            if owners is None:
                continue
            if 0 in shape:
                results[output] = own.everywhere(NOBODY, len(shape))
            else:
                results[output] = self._compress(owners)
        return results

    def _compress(self, owners: Owners) -> Owners:
        """Once for owners that many nodes share; they are kept, so that no others get their id."""
        if id(owners) not in self._compressed:
            found = own.compressed(owners)
            self._compressed[id(owners)] = (owners, found)
            self._compressed[id(found)] = (found, found)
        return self._compressed[id(owners)][1]

    def _merge(self, node: Node, output: int, owners: Owners) -> None:
        """A result that several nodes use has an output gradient that is a sum."""
        results = self._results.setdefault(node, [None] * len(shapes(node)))
        before = results[output]
        results[output] = owners if before is None else own.merged(before, owners)

    def _attribute_arguments(
        self,
        node: Node,
        results: Results,
        used: Sequence[Owners],
    ) -> Arguments:
        """Owners of each argument that needs a gradient. Refuses what mixes examples."""
        sizes = argument_shapes(node)
        if isinstance(node, BackwardCFunction):
            refuse_nonlinear(node, self.prober)
        if self.graph.examples == 1:
            return [own.everywhere(0, len(size)) for size in sizes]
        if node.name() in BATCH_NORMS and saved(node, "_saved_training"):
            _refuse_statistics(used)
        if node.name() in EMBEDDINGS:
            _refuse_frequencies(node)
        if all(own.is_all_shared(owners) for owners in used):
            return [own.everywhere(SHARED, len(size)) for size in sizes]
        return self._probe_undecided(node, results, list(argument_owners(node, results)))

    def _probe_undecided(
        self,
        node: Node,
        results: Results,
        found: list[Owners | None],
    ) -> Arguments:
        """Fills in what the operation's meaning did not decide."""
        undecided = []
        for slot, owners in enumerate(found):
            needs_gradient = node.next_functions[slot][0] is not None
            if owners is None and needs_gradient:
                undecided.append(slot)
        if undecided:
            self.probed.append(node)
            probed = self.prober.probe(node, results)
            for slot in undecided:
                found[slot] = probed[slot]
        return found


def attribute_examples(graph: Graph) -> Attribution:
    """Which example each element of each node's results belongs to.

    Raises:
        ValueError: if an operation is known to mix examples.
        WrongGradients: if a function has a backward that is not linear.
    """
    attribution = Attribution(graph, Prober(graph.examples, seed=len(graph.nodes)))
    attribution.begin_at_losses()
    for node in graph.nodes:
        attribution.hand_on(node)
    return attribution


def _refuse_statistics(used: Sequence[Owners]) -> None:
    """Batch normalisation with statistics of several examples: single ones lie in dimension 1."""
    for owners in used:
        others = [dim for dim in range(owners.dim()) if dim != 1]
        if own.is_shared(owners) or not own.is_constant(owners, others):
            raise ValueError(
                "batch normalisation in training mode mixes the examples of a batch: every loss "
                "depends on all of them, and no clipping bounds the influence of one. Use "
                "LayerNorm or GroupNorm, or put the layer into eval() mode"
            )


def _refuse_frequencies(node: Node) -> None:
    """An embedding that divides by how often a row is used in the batch, by whomever."""
    if saved(node, "_saved_scale_grad_by_freq"):
        raise ValueError(
            "an embedding with scale_grad_by_freq=True divides the gradient of an example by how "
            "often others use the same rows: no clipping bounds the influence of one. Use "
            "scale_grad_by_freq=False"
        )
