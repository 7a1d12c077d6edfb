"""Operations whose results depend on one element of each argument, and on nothing else."""

from __future__ import annotations

from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import saved
from edpsgd.per_example.operations.common import (
    Arguments,
    Meaning,
    Results,
    argument_shape,
    named,
    only_result,
    slots,
)

_NO_REDUCTION = 0


def pointwise(node: Node, results: Results) -> Arguments:
    """An element has the owner of the result's element, or of those that it was broadcast to."""
    owners = only_result(results)
    return [own.unspread(owners, argument_shape(node, slot)) for slot in slots(node)]


def pointwise_loss(node: Node, results: Results) -> Arguments:
    """Losses of single elements; with a reduction they are sums over all of them."""
    if saved(node, "_saved_reduction") == _NO_REDUCTION:
        return pointwise(node, results)
    owner = int(only_result(results).flatten()[0])
    return [own.everywhere(owner, len(argument_shape(node, slot))) for slot in slots(node)]


_POINTWISE = """
    Abs Add Addcdiv Addcmul Alias Clamp ClampMax ClampMin Clone CopyBackwards Cos Div Elu Erf Exp
    Expand Expm1 Gelu Hardsigmoid Hardswish Hardtanh LeakyRelu Lerp Log Log1P Log2 LogSigmoid
    MaskedFill Maximum Minimum Mish Mul NativeDropout Neg Pow PowTensorTensor Reciprocal Relu Rsqrt
    Rsub Selu Sigmoid Silu Sin Softplus Sqrt Sub Tanh Threshold ToCopy Where Xlogy
"""
_POINTWISE_LOSSES = """
    BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss L1Loss MseLoss SmoothL1Loss
"""
MEANINGS: dict[str, Meaning] = {
    **named(_POINTWISE, pointwise),
    **named(_POINTWISE_LOSSES, pointwise_loss),
}
