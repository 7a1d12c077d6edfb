"""Owners that meanings state, against what autograd says of every single element.

Small operations of random shapes, with examples that lie in the results in any way: along each dimension, mixed, of
nobody, of several. An operation may say that an element is shared, or leave it to the probe, but name no wrong owner.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn import functional

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import LEAF, saved, shapes
from edpsgd.per_example.operations import MEANINGS, argument_owners
from edpsgd.per_example.owners import NOBODY, SHARED

Tensors = Sequence[torch.Tensor]
_RANDOM = random.Random(0)
_CASES = 40  # of each operation
_SIZES = (1, 2, 3)


def some_shape(least: int, most: int) -> list[int]:
    return _RANDOM.choices(_SIZES, k=_RANDOM.randint(least, most))


def some(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64).add(0.1).requires_grad_()


def any_shape(least: int = 0, most: int = 4) -> torch.Tensor:
    return some(*some_shape(least, most))


def spread(count: int) -> Tensors:
    """Tensors that broadcast to the shape of one of them."""
    shape = some_shape(0, 4)
    found = []
    for _ in range(count):
        narrow = [1 if _RANDOM.random() < 0.4 else size for size in shape]
        found.append(some(*narrow[_RANDOM.randint(0, len(narrow)) :]))
    found[_RANDOM.randrange(count)] = some(*shape)
    return found


def a_dim(x: torch.Tensor) -> int:
    """One of its dimensions, also counted from the end; a number has one too."""
    ndim = max(1, x.dim())
    return _RANDOM.randrange(-ndim, ndim)


def some_dims(x: torch.Tensor) -> list[int]:
    return [_RANDOM.choice((dim, dim - x.dim())) for dim in _RANDOM.sample(range(x.dim()), _RANDOM.randint(0, x.dim()))]


def numbers(size: int, *shape: int) -> torch.Tensor:
    return torch.tensor(_RANDOM.choices(range(size), k=torch.Size(shape).numel()), dtype=torch.int64).view(shape)


def reshaped(x: torch.Tensor) -> torch.Tensor:
    sizes = [1] * _RANDOM.randint(0, 2)
    left = x.numel()
    for factor in (2, 3) * 4:
        if left % factor == 0:
            sizes.append(factor)
            left //= factor
    _RANDOM.shuffle(sizes)
    while len(sizes) > 1 and _RANDOM.random() < 0.5:
        sizes[-2:] = [sizes[-2] * sizes[-1]]
    return x.reshape(sizes)


def sliced(x: torch.Tensor) -> torch.Tensor:
    begin, end = (_RANDOM.choice((None, *range(-3, 4))) for _ in range(2))
    before = (slice(None),) * (a_dim(x) % x.dim())
    return x[(*before, slice(begin, end, _RANDOM.choice((None, 1, 2))))]


def indexed(x: torch.Tensor) -> torch.Tensor:
    """Numbers in some dimensions, beside each other or not."""
    shape = some_shape(0, 2)
    dims = [0, *some_dims(x)] if _RANDOM.random() < 0.5 else [a_dim(x)]
    places = {dim % x.dim() for dim in dims}
    chosen = [numbers(x.shape[dim], *shape) if dim in places else slice(None) for dim in range(x.dim())]
    return x[tuple(chosen)]


def gathered(x: torch.Tensor) -> torch.Tensor:
    dim, shape = a_dim(x), list(x.shape)
    if not shape:
        return x.gather(0, numbers(1, *some_shape(0, 1)))
    shape[dim] = _RANDOM.choice(_SIZES)
    return x.gather(dim, numbers(x.shape[dim], *shape))


def joined() -> tuple[Tensors, torch.Tensor]:
    shape = some_shape(1, 4)
    dim = _RANDOM.randrange(-len(shape), len(shape))
    parts = []
    for _ in range(_RANDOM.randint(1, 3)):
        shape[dim] = _RANDOM.choice((0, *_SIZES))
        parts.append(some(*shape))
    if _RANDOM.random() < 0.3:
        parts.insert(_RANDOM.randint(0, len(parts)), some(0))
    return parts, torch.cat(parts, dim)


def packed() -> tuple[Tensors, torch.Tensor]:
    steps, sequences, is_batch_first = _RANDOM.randint(1, 3), _RANDOM.randint(1, 3), _RANDOM.random() < 0.5
    sizes = (sequences, steps) if is_batch_first else (steps, sequences)
    x = some(*sizes, *some_shape(0, 2))
    lengths = torch.tensor(sorted(_RANDOM.choices(range(1, steps + 1), k=sequences), reverse=True))
    return [x], torch._pack_padded_sequence(x, lengths, is_batch_first)[0]


def of_one(change: Callable[[torch.Tensor], object], least: int = 0) -> Callable[[], tuple[Tensors, object]]:
    """A case with one argument of any shape."""

    def case() -> tuple[Tensors, object]:
        x = any_shape(least)
        return [x], change(x)

    return case


def of_spread(change: Callable[..., torch.Tensor], count: int) -> Callable[[], tuple[Tensors, object]]:
    """A case with several arguments that broadcast."""

    def case() -> tuple[Tensors, object]:
        found = spread(count)
        return found, change(*found)

    return case


def of_shapes(change: Callable[..., torch.Tensor], *names: str) -> Callable[[], tuple[Tensors, object]]:
    """A case whose arguments have a letter for each dimension, of the same size where it comes again."""

    def case() -> tuple[Tensors, object]:
        sizes = {letter: _RANDOM.choice(_SIZES) for letter in "".join(names)} | {"2": 2}
        found = [some(*(sizes[letter] for letter in name)) for name in names]
        return found, change(*found)

    return case


def is_kept() -> bool:
    return _RANDOM.random() < 0.5


CASES: dict[str, Callable[[], tuple[Tensors, object]]] = {
    "tanh": of_one(torch.tanh),
    "add": of_spread(torch.add, 2),
    "mul": of_spread(torch.mul, 2),
    "maximum": of_spread(torch.maximum, 2),
    "clamp": of_spread(lambda x, least: x.clamp(min=least), 2),
    "lerp": of_spread(torch.lerp, 3),
    "mean squares": of_shapes(lambda x, y: functional.mse_loss(x, y, reduction="mean"), "ab", "ab"),
    "squares": of_shapes(lambda x, y: functional.mse_loss(x, y, reduction="none"), "abc", "abc"),
    "reshape": of_one(reshaped),
    "squeeze": of_one(lambda x: x.squeeze(some_dims(x))),
    "unsqueeze": of_one(lambda x: x.unsqueeze(_RANDOM.randint(0, x.dim()))),
    "transpose": of_one(lambda x: x.transpose(a_dim(x), a_dim(x))),
    "permute": of_one(lambda x: x.permute(_RANDOM.sample(range(-x.dim(), 0), x.dim()))),
    "flip": of_one(lambda x: x.flip(some_dims(x))),
    "repeat": of_one(lambda x: x.repeat(_RANDOM.choices((1, 2, 3), k=x.dim() + 1))),
    "expand": of_one(lambda x: x.expand(2, *x.shape)),
    "select": of_one(lambda x: x.select(a_dim(x), -1), 1),
    "slice": of_one(sliced, 1),
    "index": of_one(indexed, 1),
    "index_select": of_one(lambda x: x.index_select((dim := a_dim(x)), numbers(x.shape[dim], *some_shape(1, 1))), 1),
    "gather": of_one(gathered),
    "cat": joined,
    "stack": of_shapes(lambda x, y, z: torch.stack([x, y, z], _RANDOM.randrange(-3, 3)), "ab", "ab", "ab"),
    "split": of_one(lambda x: x.split(_RANDOM.choice(_SIZES), a_dim(x)), 1),
    "parts": of_one(lambda x: x.split_with_sizes([0, 1, x.shape[(dim := a_dim(x))] - 1], dim), 1),
    "unbind": of_one(lambda x: x.unbind(a_dim(x)), 1),
    "pack": packed,
    "sum": of_one(lambda x: x.sum(some_dims(x), keepdim=is_kept())),
    "mean": of_one(lambda x: x.mean(some_dims(x), keepdim=is_kept())),
    "amax": of_one(lambda x: x.amax(some_dims(x), keepdim=is_kept())),
    "logsumexp": of_one(lambda x: x.logsumexp(a_dim(x), keepdim=is_kept())),
    "vector_norm": of_one(lambda x: torch.linalg.vector_norm(x, dim=some_dims(x), keepdim=is_kept())),
    "norm": of_one(lambda x: torch.ops.aten.norm(x, 3, some_dims(x), is_kept())),
    "var": of_one(lambda x: x.var(some_dims(x), correction=0, keepdim=is_kept())),
    "max": of_one(lambda x: x.max(a_dim(x), keepdim=is_kept())),
    "min of all": of_one(torch.min),
    "softmax": of_one(lambda x: x.softmax(a_dim(x))),
    "log_softmax": of_one(lambda x: x.log_softmax(a_dim(x))),
    "cumsum": of_one(lambda x: x.cumsum(a_dim(x))),
    "sort": of_one(lambda x: x.sort(a_dim(x))),
    "topk": of_one(lambda x: x.topk(1, a_dim(x))),
    "glu": of_one(lambda x: functional.glu(torch.cat([x, x], (dim := a_dim(x))).detach().requires_grad_(), dim), 1),
    "likelihood": of_shapes(lambda x: functional.nll_loss(x, numbers(x.shape[1], len(x)), reduction="none"), "ab"),
    "layer norm": of_shapes(lambda x, w, b: functional.layer_norm(x, w.shape, w, b), "abcd", "cd", "cd"),
    "group norm": of_shapes(lambda x, w, b: functional.group_norm(x, 1, w, b), "na22", "a", "a"),
    "mm": of_shapes(torch.mm, "ab", "bc"),
    "addmm": of_shapes(torch.addmm, "ac", "ab", "bc"),
    "addmm of a row": of_shapes(torch.addmm, "c", "ab", "bc"),
    "bmm": of_shapes(torch.bmm, "nab", "nbc"),
    "baddbmm": of_shapes(torch.baddbmm, "c", "nab", "nbc"),
    "mv": of_shapes(torch.mv, "ab", "b"),
    "convolution": of_shapes(lambda x, w, b: functional.conv1d(x, w, b, padding=3), "nia", "oik", "o"),
    "attention": of_shapes(functional.scaled_dot_product_attention, "nhqe", "nhke", "nhke"),
}


def some_owners(shape: Sequence[int], examples: int) -> torch.Tensor:
    """Examples along one dimension, or anywhere; some elements may be nobody's, or shared."""
    if shape and _RANDOM.random() < 0.6:
        dim = _RANDOM.randrange(len(shape))
        found = torch.tensor(_RANDOM.choices(range(NOBODY, examples), k=shape[dim]), dtype=torch.int64)
        found = found.view([-1 if place == dim else 1 for place in range(len(shape))]).expand(tuple(shape))
    else:
        count = torch.Size(shape).numel()
        found = torch.tensor(_RANDOM.choices(range(NOBODY, examples), k=count), dtype=torch.int64).view(tuple(shape))
    if _RANDOM.random() < 0.1:
        found = found.masked_fill(torch.rand(tuple(shape)) < 0.3, SHARED)
    return found


def depends(results: Tensors, owners: Sequence[torch.Tensor], owner: int, argument: torch.Tensor) -> torch.Tensor:
    """Whether what this owner has of the results depends on each element of the argument."""
    given = []
    for result, of_result in zip(results, owners, strict=True):
        given.append(torch.where(of_result == owner, 1.0 + torch.rand_like(result), 0.0))
    [found] = torch.autograd.grad(results, argument, given, retain_graph=True, allow_unused=True)
    return torch.zeros_like(argument, dtype=torch.bool) if found is None else found != 0


def compare_one_case(name: str) -> Counter[str]:
    """Which operations stated owners, and how often."""
    examples = _RANDOM.randint(2, 4)
    arguments, made = CASES[name]()
    results = [one for one in (made if isinstance(made, tuple | list) else [made]) if one.requires_grad]
    node = results[0].grad_fn
    owners = [some_owners(result.shape, examples) for result in results]
    known: list[torch.Tensor | None] = [None] * len(shapes(node))
    for result, of_result in zip(results, owners, strict=True):
        is_empty = result.numel() == 0
        known[result.output_nr] = own.everywhere(NOBODY, result.dim()) if is_empty else own.compressed(of_result)
    counted = Counter[str]()
    for (child, _), said in zip(node.next_functions, argument_owners(node, known), strict=True):
        if said is None or child is None or child.name() != LEAF:
            continue
        argument = saved(child, "variable")
        assert said.dim() == argument.dim()
        said = said.expand(argument.shape)
        for owner in (*range(examples), SHARED):
            is_wrong = depends(results, owners, owner, argument) & (said != owner) & (said != SHARED)
            assert not bool(is_wrong.any()), (node.name(), [one.shape for one in arguments], owners, said, owner)
        counted[node.name()] += 1
    return counted


@pytest.mark.parametrize("name", CASES)
def test_no_meaning_names_a_wrong_owner(name: str) -> None:
    _RANDOM.seed(0)
    torch.manual_seed(0)
    counted = Counter[str]()
    for _ in range(_CASES):
        counted += compare_one_case(name)
    assert set(counted) & set(MEANINGS)
