"""What operations mean for owners: if the owners of an operation's results are known, so are those of its arguments.

A meaning follows from the operation and its constants alone, such as the dimensions that are swapped; nothing is
learned from other batches. Where a meaning does not decide, or an operation has none, ``tracing`` looks at what the
operation does to gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import is_weight, saved, shapes
from edpsgd.per_example.owners import SHARED, Owners

Results = Sequence[Owners | None]  # of each result of a node; None where nobody used it
Arguments = Sequence[Owners | None]  # of each argument; None where gradients must be looked at
Meaning = Callable[[Node, Results], Arguments]


def arguments(node: Node, results: Results) -> Arguments:
    """Owners of the arguments; None where the operation does not tell."""
    meaning = MEANINGS.get(node.name())
    if meaning is None or isinstance(node, BackwardCFunction):  # somebody's own operation may have any name
        return [None] * len(node.next_functions)
    try:
        return meaning(node, results)
    except AttributeError:  # another version of torch keeps other constants
        return [None] * len(node.next_functions)


def _shape(node: Node, slot: int) -> tuple[int, ...]:
    """Of an argument; () if it needs no gradient."""
    child, output = node.next_functions[slot]
    return () if child is None else shapes(child)[output]


def _first(results: Results) -> Owners:
    """The owners of the first result, if it is the only one that is used."""
    first, *others = results
    if first is None or any(one is not None for one in others):
        raise AttributeError("other results are used")
    return first


def _signed(number: int) -> int:
    """Torch keeps negative numbers as unsigned ones."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _dim(node: Node, name: str, ndim: int) -> int:
    return _signed(saved(node, f"_saved_{name}")) % max(1, ndim)


def _dims(node: Node, name: str, ndim: int) -> list[int]:
    numbers = saved(node, f"_saved_{name}")
    found = [numbers] if isinstance(numbers, int) else list(numbers if numbers is not None else ())
    return [_signed(number) % max(1, ndim) for number in found] or list(range(ndim))


def _only(node: Node, found: Owners) -> Arguments:
    """The operation has one argument with such owners, and others without any."""
    return [found if slot == 0 else own.everywhere(SHARED, len(_shape(node, slot))) for slot in _slots(node)]


def _slots(node: Node) -> range:
    return range(len(node.next_functions))


# -------------------------------------------------------------------- element by element


def _pointwise(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    return [own.unspread(owners, _shape(node, slot)) for slot in _slots(node)]


def _pointwise_loss(node: Node, results: Results) -> Arguments:
    """Losses of single elements; with a reduction they are sums over all of them."""
    if saved(node, "_saved_reduction") != 0:
        return [own.everywhere(int(_first(results).flatten()[0]), len(_shape(node, slot))) for slot in _slots(node)]
    return _pointwise(node, results)


# -------------------------------------------------------------------- other shapes and places


def _reshape(node: Node, results: Results) -> Arguments:
    return [own.reshaped(_first(results), shapes(node)[0], _shape(node, 0))]


def _transpose(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    return [owners.transpose(*(_dim(node, name, owners.dim()) for name in ("dim0", "dim1")))]


def _turn(node: Node, results: Results) -> Arguments:
    return [_first(results).t()]


def _permute(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    dims = _dims(node, "dims", owners.dim())
    back = sorted(range(len(dims)), key=dims.__getitem__)
    return [owners.permute(back) if dims else owners]


def _pick(pick: Callable[[torch.Tensor], torch.Tensor], dims: Sequence[int], node: Node, owners: Owners) -> Owners:
    """Owners of an argument of which the result holds some elements.

    Args:
        pick: does to a tensor of the argument's shape what the operation did.
        dims: of the argument, from which it picks. All others are the same in the result.
        node: the operation.
        owners: of its result.
    """
    full, result = _shape(node, 0), list(shapes(node)[0])
    others = [dim for dim in range(len(full)) if dim not in dims]
    moved = [dim for dim in range(len(result)) if dim not in _new_dims(full, result, dims)]
    sizes = list(full)
    for dim, place in zip(others, moved, strict=True):
        if owners.shape[place] == 1:  # one place stands for all
            sizes[dim] = result[place] = 1
    positions = pick(torch.arange(torch.Size(sizes).numel()).view(sizes))
    if list(positions.shape) != result:
        raise AttributeError("the operation is not what it seems")
    return own.scattered(owners, positions, sizes)


def _new_dims(full: Sequence[int], result: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The dimensions of the result that took the place of some of the argument's, which are neighbours."""
    begin = min(dims)
    return list(range(begin, begin + len(dims) + len(result) - len(full)))


def _select(node: Node, results: Results) -> Arguments:
    dim, index = _dim(node, "dim", len(_shape(node, 0))), _signed(saved(node, "_saved_index"))
    return [_pick(lambda x: x.select(dim, index), [dim], node, _first(results))]


def _slice(node: Node, results: Results) -> Arguments:
    size = _shape(node, 0)
    dim = _dim(node, "dim", len(size))
    begin, end, step = (_signed(saved(node, f"_saved_{name}")) for name in ("start", "end", "step"))
    owners = _first(results)
    if step == 1 and shapes(node)[0] == size:
        return [owners]

    def pick(x: torch.Tensor) -> torch.Tensor:
        return x[(slice(None),) * dim + (slice(begin, end, step),)]

    return [_pick(pick, [dim], node, owners)]


def _index_select(node: Node, results: Results) -> Arguments:
    dim, index = _dim(node, "dim", len(_shape(node, 0))), saved(node, "_saved_index").cpu().long()
    return [_pick(lambda x: x.index_select(dim, index), [dim], node, _first(results))]


def _index(node: Node, results: Results) -> Arguments:
    """Numbers that pick places in dimensions that are neighbours."""
    if is_weight(node.next_functions[0][0]):
        return _only(node, own.everywhere(SHARED, len(_shape(node, 0))))
    indices = saved(node, "_saved_indices")
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    numbers = [indices[dim] for dim in dims]
    if dims != list(range(dims[0], dims[-1] + 1)) or any(
        one.dtype not in (torch.int64, torch.int32) for one in numbers
    ):
        return [None]
    on_cpu = tuple(one.cpu().long() for one in numbers)
    return [_pick(lambda x: x[(slice(None),) * dims[0] + on_cpu], dims, node, _first(results))]


def _repeat(node: Node, results: Results) -> Arguments:
    """Copies beside each other."""
    owners, full = _first(results), _shape(node, 0)
    missing = owners.dim() - len(full)
    owners = own.merged_along(owners, range(missing))
    owners = owners.reshape(owners.shape[missing:])
    for dim, size in enumerate(full):
        if owners.shape[dim] > 1:
            owners = _uncopied(owners, dim, size)
    return [owners]


def _uncopied(owners: Owners, dim: int, size: int) -> Owners:
    """Of what was copied to make a dimension longer."""
    copies = owners.reshape(*owners.shape[:dim], -1, size, *owners.shape[dim + 1 :])
    return own.merged_along(copies, [dim]).squeeze(dim)


def _gather(node: Node, results: Results) -> Arguments:
    """Numbers that pick along one dimension, at each place of the others."""
    owners, full, shape = _first(results), _shape(node, 0), shapes(node)[0]
    dim = _dim(node, "dim", len(full))
    is_apart = own.is_constant(owners, [dim])
    return [owners if is_apart and own.without(full, dim) == own.without(shape, dim) else None]


def _flip(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    return [owners.flip(_dims(node, "dims", owners.dim()))]


def _cat(node: Node, results: Results) -> Arguments:
    owners, shape = _first(results), shapes(node)[0]
    dim = _dim(node, "dim", len(shape))
    if owners.shape[dim] == 1:
        return [owners if len(_shape(node, slot)) == len(shape) else None for slot in _slots(node)]
    if any(child is None for child, _ in node.next_functions):
        return [None] * len(node.next_functions)  # autograd does not say how long the others are
    sizes = [_shape(node, slot)[dim] if len(_shape(node, slot)) == len(shape) else 0 for slot in _slots(node)]
    if sum(sizes) != shape[dim]:
        return [None] * len(node.next_functions)
    return list(torch.split(owners, sizes, dim))


def _stack(node: Node, results: Results) -> Arguments:
    owners, shape = _first(results), shapes(node)[0]
    dim = _dim(node, "dim", len(shape))
    return list(own.along(owners, shape, [dim]).unbind(dim))


def _split(node: Node, results: Results) -> Arguments:
    """Parts of one argument."""
    full = _shape(node, 0)
    dim = _dim(node, "dim", len(full))
    parts = [
        own.along(own.everywhere(own.NOBODY, len(full)) if one is None else one, shape, [dim])
        for one, shape in zip(results, shapes(node), strict=True)
    ]
    return [_joined(parts, dim)]


def _unbind(node: Node, results: Results) -> Arguments:
    full = _shape(node, 0)
    dim = _dim(node, "dim", len(full))
    parts = [own.everywhere(own.NOBODY, len(full) - 1) if one is None else one for one in results]
    return [_joined([part.unsqueeze(dim) for part in parts], dim)]


def _joined(parts: Sequence[Owners], dim: int) -> Owners:
    """Owners of all parts in one tensor."""
    widest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    alike = [part.expand([*widest[:dim], part.shape[dim], *widest[dim + 1 :]]) for part in parts]
    return torch.cat(alike, dim)


def _pack(node: Node, results: Results) -> Arguments:
    """Padded sequences to packed ones: the first step of all of them, then the second, and so on."""
    owners, counts = _first(results), saved(node, "_saved_result1").tolist()
    shape = _shape(node, 0)
    if not own.is_constant(owners, range(1, owners.dim())) or owners.shape[0] == 1:
        return [None] if owners.shape[0] > 1 else [own.everywhere(int(owners.flatten()[0]), len(shape))]
    is_batch_first = saved(node, "_saved_batch_first")
    steps, sequences = (shape[1], shape[0]) if is_batch_first else (shape[0], shape[1])
    found = torch.full((steps, sequences), own.NOBODY, dtype=torch.int64)
    begins = [0, *itertools.accumulate(counts)]
    for step, rows in enumerate(owners.flatten()[i:j] for i, j in itertools.pairwise(begins)):
        found[step, : len(rows)] = rows
    found = found.T if is_batch_first else found
    return [found.reshape(*found.shape, *[1] * (len(shape) - 2))]


# -------------------------------------------------------------------- along dimensions


def _reduce(node: Node, results: Results) -> Arguments:
    """A sum, a mean, a largest element: of elements that all have the owner of the result."""
    owners, ndim = results[0], len(_shape(node, 0))
    if owners is None:
        raise AttributeError("its first result is not used")
    if owners.dim() == ndim:
        return [owners]
    for dim in sorted(_dims(node, "dim", ndim)) if hasattr(node, "_saved_dim") else range(ndim):
        owners = owners.unsqueeze(dim)
    return [owners if owners.dim() == ndim else None]


def _along(node: Node, results: Results) -> Arguments:
    """Elements depend on others along one dimension."""
    owners = results[0]
    if owners is None:
        raise AttributeError("its first result is not used")
    is_apart = own.is_constant(owners, [_dim(node, "dim", owners.dim())])
    return [owners if is_apart else None]


def _layer_norm(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    features = len(saved(node, "_saved_normalized_shape"))
    is_apart = own.is_constant(owners, range(owners.dim() - features, owners.dim()))
    others = [own.unspread(owners, _shape(node, slot)) for slot in _slots(node)[1:]]
    return [owners if is_apart else None, *others]


def _group_norm(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    return _only(node, owners) if own.is_constant(owners, range(1, owners.dim())) else [None] * len(_slots(node))


def _batch_norm(node: Node, results: Results) -> Arguments:
    """With statistics that are given, or of its own for each place of the second dimension."""
    owners = _first(results)
    is_apart = not saved(node, "_saved_training")
    is_apart = is_apart or own.is_constant(owners, [dim for dim in range(owners.dim()) if dim != 1])
    return _only(node, owners) if is_apart else [None] * len(_slots(node))


def _nll(node: Node, results: Results) -> Arguments:
    """The class is the second dimension, or the first of a single example."""
    owners, ndim = _first(results), len(_shape(node, 0))
    if saved(node, "_saved_reduction") != 0:
        return [own.everywhere(int(owners.flatten()[0]), ndim)]
    return [owners.unsqueeze(1 if ndim > 1 else 0)]


# -------------------------------------------------------------------- products


def _looked(node: Node, found: Sequence[Owners]) -> Arguments:
    """Products with zeros, as of a mask, may keep examples apart: that is looked at, but for weights."""
    return [
        None if own.is_shared(owners) and not is_weight(child) else owners
        for owners, (child, _) in zip(found, node.next_functions, strict=True)
    ]


def _product(owners: Owners) -> list[Owners]:
    """Of both matrices: rows of the first, columns of the second."""
    return [own.merged_along(owners, [owners.dim() - 1]), own.merged_along(owners, [owners.dim() - 2])]


def _mm(node: Node, results: Results) -> Arguments:
    return _looked(node, _product(_first(results)))


def _addmm(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    return _looked(node, [own.unspread(owners, _shape(node, 0)), *_product(owners)])


def _bmm(node: Node, results: Results) -> Arguments:
    """Products of many pairs of matrices, one pair for each place of the first dimension."""
    owners = _first(results)
    parts = _product(owners)
    if node.name().startswith("Baddbmm"):
        parts = [own.unspread(owners, _shape(node, 0)), *parts]
    return _looked(node, parts)


def _mv(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    return _looked(node, [owners.unsqueeze(1), own.merged_along(owners, [0])])


def _convolution(node: Node, results: Results) -> Arguments:
    owners = _first(results)
    if not own.is_constant(owners, range(1, owners.dim())):
        return [None] * len(_slots(node))
    weights = own.merged_along(owners, [0])
    return [owners, weights, weights.flatten()][: len(_slots(node))]


def _attention(node: Node, results: Results) -> Arguments:
    """Queries, keys and values: examples and heads come first. A mask is spread over them."""
    owners = _first(results)
    if owners.dim() < 3 or not own.is_constant(owners, range(1, owners.dim())):
        return [None] * len(_slots(node))
    apart = [owners] * min(3, len(_slots(node)))
    return [*apart, *(own.unspread(owners, _shape(node, slot)) for slot in _slots(node)[3:])]


def lstm_sequences(node: Node, results: Results) -> Owners | None:
    """The owner of each sequence of an LSTM layer that oneDNN runs as one operation.

    Its results are steps x sequences x features, and two states. None, if a sequence does not belong to one example.
    """
    found: Owners | None = None
    for owners, shape in zip(results[:3], shapes(node)[:3], strict=True):
        if owners is not None:
            if not own.is_constant(owners, [dim for dim in range(len(shape)) if dim != len(shape) - 2]):
                return None
            flat = owners.flatten()
            found = flat if found is None else own.merged(found, flat)
    return None if found is None or own.is_shared(found) else found


def _lstm(node: Node, results: Results) -> Arguments:
    sequences = lstm_sequences(node, results)
    if sequences is None:
        return [None] * len(_slots(node))
    found: list[Owners] = []
    for slot in _slots(node):
        ndim = len(_shape(node, slot))
        is_weight_or_bias = 1 <= slot <= 4 or ndim < 2
        places = [-1 if dim == ndim - 2 else 1 for dim in range(ndim)]
        found.append(own.everywhere(SHARED, ndim) if is_weight_or_bias else sequences.reshape(places))
    return found


def _nothing(node: Node, results: Results) -> Arguments:
    """A table of weights, from which numbers pick."""
    return [own.everywhere(SHARED, len(_shape(node, slot))) for slot in _slots(node)]


_POINTWISE = """
    Abs Add Addcdiv Addcmul Alias Clamp ClampMax ClampMin Clone CopyBackwards Cos Div Elu Erf Exp Expand Expm1 Gelu
    Hardsigmoid Hardswish Hardtanh LeakyRelu Lerp Log Log1P Log2 LogSigmoid MaskedFill Maximum Minimum Mish Mul
    NativeDropout Neg Pow PowTensorTensor Reciprocal Relu Rsqrt Rsub Selu Sigmoid Silu Sin Softplus Sqrt Sub Tanh
    Threshold ToCopy Where Xlogy
"""


def _named(kinds: str, meaning: Meaning) -> dict[str, Meaning]:
    """For all forms of some operations: autograd numbers them."""
    names = [name if name.endswith("s") and "Backwards" in name else f"{name}Backward" for name in kinds.split()]
    numbered = [f"{name}{number}" for name in names for number in range(4)]
    return dict.fromkeys([*numbered, *(f"torch::autograd::{name}" for name in names)], meaning)


BATCH_NORMS = {f"{kind}BatchNormBackward0" for kind in ("Native", "Cudnn", "Miopen")}
EMBEDDINGS = {"EmbeddingBackward0", "EmbeddingBagBackward0"}
MEANINGS: dict[str, Meaning] = {
    **_named(_POINTWISE, _pointwise),
    **_named("MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropyWithLogits BinaryCrossEntropy L1Loss", _pointwise_loss),
    **_named("View UnsafeView ReshapeAlias Squeeze Unsqueeze", _reshape),
    **_named("Transpose", _transpose),
    **_named("T", _turn),
    **_named("Permute", _permute),
    **_named("Select", _select),
    **_named("Slice", _slice),
    **_named("IndexSelect", _index_select),
    **_named("Index", _index),
    **_named("Gather", _gather),
    **_named("Repeat", _repeat),
    **_named("Flip", _flip),
    **_named("Cat", _cat),
    **_named("Stack", _stack),
    **_named("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes", _split),
    **_named("Unbind", _unbind),
    **_named("PackPaddedSequence", _pack),
    **_named("Sum Mean Amax Amin Logsumexp LinalgVectorNorm Norm Var Std Max Min", _reduce),
    **_named("Softmax SafeSoftmax LogSoftmax Cumsum Logcumsumexp Cumprod Sort Topk Glu", _along),
    **_named("NativeLayerNorm FusedRmsNorm", _layer_norm),
    **_named("NativeGroupNorm", _group_norm),
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **_named("NllLoss NllLoss2D", _nll),
    **_named("Mm", _mm),
    **_named("Addmm", _addmm),
    **_named("Bmm Baddbmm", _bmm),
    **_named("Mv", _mv),
    **_named("Convolution", _convolution),
    **_named("ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention", _attention),
    **_named("ScaledDotProductFlashAttention ScaledDotProductCudnnAttention", _attention),
    **_named("MkldnnRnnLayer", _lstm),
    **_named("Embedding EmbeddingBag", _nothing),
}
