"""One batch: which operations take a parameter, what they receive in the backward pass, and what follows from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext

import torch
from torch.autograd.graph import GradientEdge, Node

from edpsgd.per_example import owners as own
from edpsgd.per_example import recurrent
from edpsgd.per_example.attribution import Trace
from edpsgd.per_example.fallback import Cut, find_cut
from edpsgd.per_example.ghost import LayerGradients, Products, exact
from edpsgd.per_example.graph import LEAF, Gradients, Graph, shapes
from edpsgd.per_example.layout import Layout, Units
from edpsgd.per_example.nonfinite import only
from edpsgd.per_example.operations import lstm_sequences
from edpsgd.per_example.rules import Received, Use, allows, uses

_GAINS = (11.3, 1 / 43.7)
_GAIN = 2.0**30  # by which hooks show themselves; float16 has no room for it


class Batch:
    """The gradients of a batch's units, for all parameters.

    Args:
        parameters: by name.
        losses: one for each example.
        weights: of the losses.
        units: of the examples.
        distrusted: names of parameters to leave to autograd.
        compared: operations that agreed with autograd in earlier batches.
        is_due: whether this batch shall be compared too.

    Attributes:
        kinds: the operations of this batch.
        is_new: whether one of them was never compared.
        is_checked: whether autograd must be asked too.
        may_spread: whether NaN of one unit may reach others: not where each operation is known to keep them apart.
        without_rule: names of parameters that are left to autograd, for an operation that has no rule.
        shared: names of those with rows that belong to several examples.
        tolerance: relative, of the precision in which the gradients came.
        has_halves: whether anything in the graph is in half precision, so that sums are rounded.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        losses: torch.Tensor,
        weights: torch.Tensor,
        units: Units,
        distrusted: Set[str],
        compared: Set[str],
        is_due: bool,
    ) -> None:
        self._parameters, self._losses, self._weights, self._units = parameters, losses, weights, units
        self._numbers = {name: number for number, name in enumerate(parameters)}
        self._graph = Graph(losses)
        self.kinds = {node.name() for node in self._graph.nodes}
        _refuse_reentrant(self.kinds)
        self.is_new = not self.kinds <= compared
        self.is_checked = is_due or self.is_new
        self._trace = Trace(self._graph)
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._served: dict[str, list[tuple[Use, Layout]]] = {}
        self._cut_at: dict[frozenset[Node], list[str]] = {}
        self.without_rule: list[str] = []
        self.shared: list[str] = []
        self._plan(distrusted)
        self._layers: dict[int, LayerGradients] = {}
        self._cuts: list[Cut] = []
        self._gates: dict[Node, torch.Tensor] = {}
        self._has_broken = False
        self.may_spread = bool(self._cut_at or self._trace.tried)
        self._go_back(is_last=not (self.is_checked or self.may_spread))

    # ---------------------------------------------------------------- what to look at

    def _find_uses(self) -> dict[str, list[Use]]:
        leaves = self._graph.leaves
        trained = {name: p for name, p in self._parameters.items() if id(p) in leaves}
        return {name: uses(self._graph, leaves[id(p)], p.shape) for name, p in trained.items()}

    def _plan(self, distrusted: Set[str]) -> None:
        """Rules where they can be used for all that a parameter does; else a cut."""
        for name, found in self._find_uses().items():
            if name in distrusted:
                self._cut_at.setdefault(frozenset([self._graph.root[0]]), []).append(name)
                continue
            found = [use for use in found if 0 not in shapes(use.receiver)[0]]  # a part of the batch may be empty
            served = [(use, self._layout(use)) for use in found]
            if all(layout is not None for _, layout in served):
                self._served[name] = [(use, layout) for use, layout in served if layout is not None]
                continue
            is_shared = any(not self._tells_apart(use.receiver) for use in found)
            (self.shared if is_shared else self.without_rule).append(name)
            cut = find_cut(self._graph, [use.node for use in found], self._is_cut)
            self._cut_at.setdefault(cut, []).append(name)

    def _tells_apart(self, node: Node) -> bool:
        """Whether each element of its results belongs to one example."""
        return not any(own.is_shared(self._trace.owners(node, output)) for output in self._graph.used[node])

    def _is_cut(self, node: Node) -> bool:
        return self._graph.used[node] == {0} and self._tells_apart(node)

    def _layout(self, use: Use) -> Layout | None:
        """How the examples lie in what the rule looks at; None if there is no rule, or not for that."""
        if use.rule is None or not self._tells_apart(use.receiver):
            return None
        if use.node.name() == recurrent.NAME:
            sequences = lstm_sequences(use.node, self._trace.results(use.node))
            return None if sequences is None else self._made(1, sequences, shapes(use.node)[0][1])
        if self._graph.used[use.receiver] != {0}:
            return None
        owners, shape = self._trace.owners(use.receiver), shapes(use.receiver)[0]
        changing = [dim for dim, size in enumerate(owners.shape) if size > 1]
        for dim in changing or range(len(shape)):
            if len(changing) <= 1 and allows(use, dim):
                return self._made(dim, owners.flatten(), shape[dim])
        return None

    def _made(self, dim: int, labels: torch.Tensor, size: int) -> Layout:
        """The same object for the same labels, so that what follows from them is computed once."""
        key = (dim, size, labels.numpy().tobytes())
        if key not in self._layouts:
            # Places that nobody owns have gradients of zero, and may count as anyone's.
            self._layouts[key] = Layout(dim, labels.clamp(min=0).expand(size).contiguous())
        return self._layouts[key]

    # ---------------------------------------------------------------- the backward pass

    def _gradients(self, nodes: Iterable[Node], weights: torch.Tensor, is_last: bool = False) -> dict[Node, Gradients]:
        """What the nodes receive; parameters get nothing, for nobody asks for it. The last time frees the graph."""
        return self._graph.gradients(self._losses, weights.to(self._losses), nodes, is_last)

    def _around_layers(self, nodes: Sequence[Node], is_last: bool) -> dict[Node, Gradients]:
        """The same, but LSTM layers of one operation are gone through by hand, if there is no way around them.

        Their own backward would also make the plain sum of the weights' gradients, for which there is no use.
        """
        served = {use.node: use for found in self._served.values() for use, _ in found}
        layers = [node for node in self._graph.nodes if node in served and recurrent.is_by_hand(node)]
        groups = [list(group) for _, group in itertools.groupby(layers, lambda node: node.next_functions[0])]
        edges = [group[0].next_functions[0] for group in groups]
        begins = [self._graph.root[0], *(begin for begin, _ in edges)]
        stretches = [set() if begin is None else {begin} | self._graph.below(begin, layers) for begin in begins]
        passed = [node for stretch in stretches for node in stretch - set(self._graph.leaves.values())]
        if len(passed) > len(set(passed)) or not set(nodes) <= set(passed):
            return self._gradients(nodes, self._weights, is_last)
        received = self._gradients([node for node in nodes if node in stretches[0]], self._weights, is_last)
        for group, (begin, output), stretch in zip(groups, edges, stretches[1:], strict=True):
            for node in group:
                workspace = served[node].saved(recurrent.WORKSPACE)
                self._gates[node] = recurrent.gate_gradients(served[node], received[node], workspace)
                if is_last:
                    self._graph.release(node)
            if begin is not None:
                parts = [recurrent.input_gradient(served[node], self._gates[node]) for node in group]
                gradient = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
                below = [node for node in nodes if node in stretch]
                received |= self._graph.gradients(GradientEdge(begin, output), gradient, below, is_last)
        return received

    def _go_back(self, is_last: bool) -> None:
        receivers = [use.receiver for served in self._served.values() for use, _ in served]
        for served in self._served.values():
            for use, _ in served:
                use.hold()
        cut = {node for nodes in self._cut_at for node in nodes}
        nodes = [*receivers, *(node for node in self._graph.nodes if node in cut)]
        received = self._around_layers(nodes, is_last)
        kinds = {one.dtype for results in received.values() for one in results if one is not None}
        precisions = self._graph.precisions() | {p.dtype for p in self._parameters.values()}
        self.has_halves = bool(precisions & {torch.bfloat16, torch.float16})
        self._gain = 1.0 if torch.float16 in precisions else _GAIN
        self.tolerance = 0.03 if kinds & {torch.bfloat16, torch.float16} else 1e-3
        products = Products()
        at: dict[Node, Received] = {}
        for name, served in self._served.items():
            layer = LayerGradients(self._parameters[name], self._units.count, products)
            for use, layout in served:
                if use.receiver not in at:
                    made = {"gates": self._gates.pop(use.receiver)} if use.receiver in self._gates else {}
                    at[use.receiver] = Received(received[use.receiver], layout, self._units, made)
                if use.rule is not None and any(one is not None for one in received[use.receiver]):
                    use.rule(use, at[use.receiver], layer)
            self._layers[self._numbers[name]] = layer
        self._cuts = [self._make_cut(cut, names, received) for cut, names in self._cut_at.items()]

    def _make_cut(self, cut: Set[Node], names: Sequence[str], received: dict[Node, Gradients]) -> Cut:
        edges, gradients = [], []
        below = {node for top in cut for node in (top, *self._graph.below(top))}
        is_rounded = any(node.name() == "ToCopyBackward0" for node in below)
        for node in (one for one in self._graph.nodes if one in cut):  # in the same order every time
            for edge in self._graph.edges(node):
                gradient = received[node][edge.output_nr]
                if gradient is not None:
                    edges.append(edge)
                    gradients.append((gradient, self._trace.owners(node, edge.output_nr)))
        parameters = {self._numbers[name]: self._parameters[name] for name in names}
        return Cut(edges, gradients, parameters, self._units, is_rounded)

    # ---------------------------------------------------------------- results

    def norms(self) -> torch.Tensor:
        """Units x layers."""
        found = self._norms_by_rules()
        for cut in self._cuts:
            found.update(cut.norms())
        home = self._losses.device
        none = torch.zeros(self._units.count, device=home)
        columns = [found[number].to(home) if number in found else none for number in range(len(self._parameters))]
        dtype = torch.float32
        for column in columns:
            dtype = torch.promote_types(dtype, column.dtype)
        return torch.stack([column.to(dtype) for column in columns], dim=1)

    def _norms_by_rules(self) -> dict[int, torch.Tensor]:
        """Of the layers that rules serve; what single precision has no room for is made again."""
        found, left = {}, {}
        for number, layer in self._layers.items():
            found[number], left[number] = layer.norms()
        columns = [one.to(self._losses.device) for one in left.values()]
        has_left = torch.stack(columns).cpu() if columns else torch.empty((0, self._units.count))  # waits once
        for number, units in zip(left, has_left, strict=True):
            if bool(units.any()):
                norms = self._layers[number].precise_norms(units)
                found[number][units.to(norms.device)] = norms.to(found[number].dtype)
        return found

    def keeps_zero(self) -> bool:
        """Whether no infinity that an operation kept makes NaN of gradients of zero, so that they reach other units."""
        if self.shared or not self._trace.keep_zero():
            return False
        nothing = self.by_autograd(torch.zeros(self._units.count))
        return all(bool(torch.isfinite(one).all()) for one in nothing.values())

    def _places(self) -> dict[Node, list[torch.Tensor | None]]:
        """The units of what nodes receive, where that is one unit for each element."""
        found = {}
        for node in self._graph.nodes:
            if node.name() != LEAF and self._tells_apart(node):
                results = self._trace.results(node)
                found[node] = [None if one is None else self._units_of(one) for one in results]
        return found

    def _units_of(self, owners: torch.Tensor) -> torch.Tensor:
        return torch.where(owners >= 0, self._units.of_examples[owners.clamp(min=0)], owners)

    def drop(self, units: torch.Tensor) -> None:
        """Makes the gradients of some units zero. Autograd is kept from mixing them with others."""
        self._has_broken = True
        for layer in self._layers.values():
            layer.drop(units)
        for cut in self._cuts:
            cut.drop(units)

    def add_weighted_(self, sums: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Adds each unit's gradient times its factor."""
        for number in self._layers:
            self._add_layer_(number, sums[number], factors if factors.dim() == 1 else factors[:, number])
        for cut in self._cuts:
            cut.add_weighted_(sums, factors)

    def _add_layer_(self, number: int, total: torch.Tensor, factors: torch.Tensor) -> None:
        precise = exact(total).contiguous()  # as a rule the same tensor
        self._layers[number].add_weighted_(precise, factors.to(precise))
        if precise is not total:
            total.copy_(precise)

    def sums(self, factors: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The number of each layer and the sum of the units' gradients, each times its factor; one layer at a time."""
        trained = {number: p for number, p in enumerate(self._parameters.values()) if p.requires_grad}
        by_cuts = {n: _zeros_like(p) for cut in self._cuts for n, p in cut.parameters.items()}
        for cut in self._cuts:
            cut.add_weighted_(by_cuts, factors)
        for number, parameter in trained.items():
            total = by_cuts.get(number, _zeros_like(parameter))
            if number in self._layers:
                self._add_layer_(number, total, factors if factors.dim() == 1 else factors[:, number])
            yield number, total

    @property
    def shows_hooks(self) -> bool:
        """Whether ``by_autograd_far_off`` differs where gradients do not grow as their losses do."""
        return self._gain > 1

    @property
    def numbers(self) -> list[int]:
        """Of the layers that have gradients."""
        return [*self._layers, *(number for cut in self._cuts for number in cut.parameters)]

    @property
    def slow(self) -> list[str]:
        """Names of parameters that no rule serves in this batch."""
        return [name for names in self._cut_at.values() for name in names]

    def norms_of(self, unit: int) -> Iterator[tuple[int, float]]:
        """The number of each layer that a rule serves, and the norm of the gradient that one unit has there."""
        for number, layer in self._layers.items():
            yield number, layer.norm_of(unit)

    def noise_of_autograd(self, factors: torch.Tensor) -> dict[int, float]:
        """By how much autograd's own sums are off in half precision: how they change if all losses are scaled.

        Exact ones would not change. The gains are no powers of two, so that everything is rounded otherwise, and one
        of them is small, so that what float16 loses below its range is at least what was lost of the units' gradients.
        """
        once = self.by_autograd(factors)
        noise = dict.fromkeys(once, 0.0)
        for gain in _GAINS:
            for number, other in self.by_autograd(factors * gain).items():
                difference = other.double() / gain - once[number].double()
                noise[number] = max(noise[number], float(difference.norm()))
        return noise

    def by_autograd_far_off(self, factors: torch.Tensor) -> dict[int, torch.Tensor]:
        """The same by autograd for losses that are far larger, and smaller again afterwards.

        A hook that clamps or normalises gradients then makes others. The gain is a power of two, so that nothing else
        is rounded in another way; where it leaves the range, nothing is scaled.
        """
        found = self.by_autograd(factors * self._gain)
        if not all(bool(torch.isfinite(one).all()) for one in found.values()):
            return self.by_autograd(factors)
        return {number: one / self._gain for number, one in found.items()}

    def by_autograd(self, factors: torch.Tensor) -> dict[int, torch.Tensor]:
        """The same sums by autograd alone; without layers that have no gradient."""
        weights = self._weights * factors.to(self._weights)[self._units.of_examples.to(self._weights.device)]
        trained = {number: p for number, p in enumerate(self._parameters.values()) if p.requires_grad}
        with only((factors != 0).cpu(), self._places()) if self._has_broken else nullcontext():
            found = torch.autograd.grad(
                [self._losses], list(trained.values()), [weights], retain_graph=True, allow_unused=True
            )
        return {number: one for number, one in zip(trained, found, strict=True) if one is not None}


def _refuse_reentrant(kinds: Set[str]) -> None:
    """A re-entrant checkpoint hides the parameters inside it, which would get no gradient, and nobody would notice."""
    if "CheckpointFunctionBackward" in kinds:
        raise ValueError(
            "the model uses torch.utils.checkpoint with use_reentrant=True, which hides the layers inside it: "
            "gradients of single examples need checkpoint(..., use_reentrant=False); models of transformers take "
            'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
        )


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """In the usual order, also if the parameter lies otherwise in the memory, as with channels_last."""
    return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
