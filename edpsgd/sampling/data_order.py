"""Whether all workers have the same examples in the same order: a digest of what can be read at given places.

Workers share the examples out by index. If the data come from a set, or from a folder listing that nobody sorted, one
example has other indices on other workers, and can be in the batches of two of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

_IN_MEMORY = 4096  # items of a list that are looked at: no file has to be read for them
_READ = 64  # items of a data set, which may have to read a file for each


def order_digest(examples: object) -> bytes | None:
    """A digest of examples at equally spaced places, the same in every process that has the same ones in this order.

    It depends neither on hashes nor on addresses of objects. It says something of private data: it is for comparing,
    and for no log.

    Args:
        examples: what a sampler was given.

    Returns:
        None if there is nothing to index, or what comes out has no digest or changes from one reading to the next.

    Example:
        >>> order_digest(["a", "b"]) == order_digest(["a", "b"]) != order_digest(["b", "a"])
        True
        >>> order_digest(2) is None
        True
    """
    if isinstance(examples, range):  # numbers of examples, which say nothing about them
        return None
    if isinstance(examples, list | tuple | np.ndarray | torch.Tensor):
        return _read(examples, _IN_MEMORY)
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        return None
    with _random_state_kept():
        first, second = _read(examples, _READ), _read(examples, _READ)
    return first if first == second else None  # what is augmented at random differs between workers too


def _read(examples: Any, most: int) -> bytes | None:
    """A digest of at most so many examples, the first and the last among them; None if one cannot be read."""
    digest = hashlib.blake2b(digest_size=32)
    try:
        count = len(examples)
        for number in range(min(count, most)):
            place = number if count <= most else number * (count - 1) // (most - 1)
            digest.update(_digest(examples[place]))
    except Exception:  # a data set may fail in any way if it is asked for an item here: then nothing is known
        return None
    return digest.digest()


def _digest(item: object) -> bytes:
    """The digest of one item, by its kind and its value: 16 bytes."""
    return hashlib.blake2b(_kind(item) + b":" + _value(item), digest_size=16).digest()


def _kind(item: object) -> bytes:
    return type(item).__qualname__.encode()


def _value(item: object) -> bytes:
    """Bytes that are the same for equal values of one kind, in every process."""
    if isinstance(item, bytes | bytearray):
        return bytes(item)
    if isinstance(item, str):
        return item.encode("utf-8", "surrogatepass")
    if item is None or isinstance(item, bool | int | float | complex | np.generic):
        return repr(item).encode()
    if isinstance(item, torch.Tensor):
        flat = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return repr((tuple(item.shape), item.dtype)).encode() + flat.numpy().tobytes()
    if isinstance(item, np.ndarray) and item.dtype != object:
        return repr((item.shape, item.dtype.str)).encode() + item.tobytes()
    if isinstance(item, Mapping):  # in whatever order it was filled
        return b"".join(sorted(_digest(key) + _digest(value) for key, value in item.items()))
    if isinstance(item, set | frozenset):
        return b"".join(sorted(_digest(part) for part in item))
    if isinstance(item, Sequence | np.ndarray):
        return b"".join(_digest(part) for part in item)
    if is_dataclass(item):
        return b"".join(_digest(getattr(item, field.name)) for field in fields(item))
    raise TypeError(f"no digest of a {type(item).__name__}")


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Reading items may draw random numbers, which the training must not miss afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
