"""One batch through the engine: its graph is read, a plan made, and one backward pass run.

The steps are those that the package's README lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch.autograd.graph import Node

from edpsgd.per_example.attribution import Attribution, attribute_examples
from edpsgd.per_example.autograd_sums import AutogradSums
from edpsgd.per_example.backward_pass import BackwardPass
from edpsgd.per_example.fallback import FallbackGradients, has_casts
from edpsgd.per_example.ghost import LayerGradients
from edpsgd.per_example.graph import OutputGradients, read_graph
from edpsgd.per_example.layout import Layout, Units
from edpsgd.per_example.plan import Plan, Planner
from edpsgd.per_example.results import BatchGradients
from edpsgd.per_example.row_products import Products
from edpsgd.per_example.uses import Received

_HALVES = {torch.float16, torch.bfloat16}


def compute_batch(
    parameters: Mapping[str, torch.Tensor],
    losses: torch.Tensor,
    weights: torch.Tensor,
    units: Units,
    distrusted: Set[str],
    compared: Set[str],
    is_due: bool,
) -> BatchGradients:
    """Goes through the graph of a batch once.

    Args:
        parameters: by name.
        losses: one for each example.
        weights: of the losses.
        units: of the examples.
        distrusted: names of parameters to leave to autograd.
        compared: operations that agreed with autograd in earlier batches.
        is_due: whether this batch shall be compared too.
    """
    graph = read_graph(losses)
    kinds = {node.name() for node in graph.nodes}
    _refuse_reentrant(kinds)
    is_new = not kinds <= compared
    is_compared = is_due or is_new
    attribution = attribute_examples(graph)
    plan = Planner(parameters, attribution).make_plan(distrusted)
    may_spread = bool(plan.cuts or attribution.probed)

    backward = BackwardPass(graph, plan, losses, weights, is_last=not (is_compared or may_spread))
    backward.run()

    precisions = graph.precisions() | {parameter.dtype for parameter in parameters.values()}
    return BatchGradients(
        parameters,
        units,
        layers=_apply_rules(parameters, plan, backward, units),
        fallbacks=_make_fallbacks(parameters, plan, backward, attribution, units),
        autograd=AutogradSums(
            parameters,
            losses,
            weights,
            units,
            attribution,
            has_room=torch.float16 not in precisions,
        ),
        kinds=kinds,
        is_new=is_new,
        is_compared=is_compared,
        may_spread=may_spread,
        without_rule=plan.without_rule,
        shared=plan.shared,
        tolerance=_tolerance(backward.received),
        has_halves=bool(precisions & _HALVES),
    )


def _refuse_reentrant(kinds: Set[str]) -> None:
    """A re-entrant checkpoint hides the parameters inside it: they would get no gradient."""
    if "CheckpointFunctionBackward" in kinds:
        raise ValueError(
            "the model uses torch.utils.checkpoint with use_reentrant=True, which hides the "
            "layers inside it: gradients of single examples need checkpoint(..., "
            "use_reentrant=False); models of transformers take "
            'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
        )


def _tolerance(received: Mapping[Node, OutputGradients]) -> float:
    dtypes = {one.dtype for results in received.values() for one in results if one is not None}
    return 0.03 if dtypes & _HALVES else 1e-3


def _apply_rules(
    parameters: Mapping[str, torch.Tensor],
    plan: Plan,
    backward: BackwardPass,
    units: Units,
) -> dict[int, LayerGradients]:
    """The gradients of the parameters that rules serve, in factors; by number."""
    numbers = {name: number for number, name in enumerate(parameters)}
    products = Products()
    # What rules for several parameters of an operation read. If all of it belongs to one example,
    # each parameter may have another dimension for its layout.
    of_nodes: dict[tuple[Node, Layout], Received] = {}
    layers: dict[int, LayerGradients] = {}
    for name, served in plan.served.items():
        layer = LayerGradients(parameters[name], units.count, products)
        for one in served:
            node = one.use.receiver
            key = (node, one.layout)
            if key not in of_nodes:
                common = {"gates": backward.gates.pop(node)} if node in backward.gates else {}
                of_nodes[key] = Received(backward.received[node], one.layout, units, common)
            if any(gradient is not None for gradient in backward.received[node]):
                one.rule.add(one.use, of_nodes[key], layer)
        layers[numbers[name]] = layer
    return layers


def _make_fallbacks(
    parameters: Mapping[str, torch.Tensor],
    plan: Plan,
    backward: BackwardPass,
    attribution: Attribution,
    units: Units,
) -> list[FallbackGradients]:
    """One for the parameters below each cut."""
    numbers = {name: number for number, name in enumerate(parameters)}
    found = []
    for cut, names in plan.cuts.items():
        of_names = {numbers[name]: parameters[name] for name in names}
        edges, output_gradients = [], []
        for node in attribution.graph.nodes:  # in the same order every time
            if node not in cut:
                continue
            for edge in attribution.graph.edges(node):
                # What the losses received has been through their hooks, which will run again.
                is_root = node is attribution.graph.root[0]
                received = backward.received[node][edge.output_nr]
                gradient = backward.weights.to(backward.losses) if is_root else received
                if gradient is not None:
                    edges.append(edge)
                    output_gradients.append((gradient, attribution.owners(node, edge.output_nr)))
        casts = has_casts(attribution.graph, cut)
        found.append(FallbackGradients(edges, output_gradients, of_names, units, casts))
    return found
