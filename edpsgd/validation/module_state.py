"""What a module holds beside its parameters: found wherever it is kept, compared, and put back."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

_Values = torch.Tensor | np.ndarray[Any, Any]
_UNNAMED = ("_parameters", "_buffers", "_modules")  # torch's dictionaries, no part of a tensor's name
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial)


@dataclass
class _Found:
    """All that a walk through a module met, each once."""

    values: dict[str, _Values] = field(default_factory=dict)
    holders: list[Any] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)


class Snapshot:
    """A module's parameters, buffers and attributes as they were.

    Attributes are looked through: lists, tuples, dicts, sets and deques to any depth, and other objects one level
    deep, so that a queue of a class of its own is found, and not all that a trainer object may refer to.

    Args:
        modules: what to look at.
        with_parameters: whether parameters are copied too; without, only what else may change is.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer.queue = [torch.zeros(2)]
        >>> before = Snapshot([layer])
        >>> layer.queue.append(torch.ones(2))
        >>> before.changes()
        ['queue[1]']
        >>> before.restore()
        >>> len(layer.queue)
        1
    """

    def __init__(self, modules: Iterable[nn.Module], with_parameters: bool = True) -> None:
        self._modules, self._with_parameters = list(modules), with_parameters
        found = self._find()
        self._values = found.values
        self._copies = {name: _copy(value) for name, value in found.values.items()}
        self._holders = [(holder, _contents(holder)) for holder in found.holders]

    def changes(self) -> list[str]:
        """The names of tensors and arrays that are new, gone or have other values."""
        now = self._find().values
        other = [name for name, value in now.items() if not _is_same(value, self._copies.get(name))]
        return other + [name for name in self._copies if name not in now]

    def restore(self) -> None:
        """Puts values, attributes and the contents of lists and the like back; parameters only where they changed."""
        for name, value in self._values.items():
            copy = self._copies[name]
            if isinstance(value, nn.Parameter) and _is_same(value, copy):
                continue  # a new version would spoil a graph that somebody has kept
            _write(value, copy)
        for holder, contents in self._holders:
            _refill(holder, contents)

    def _find(self) -> _Found:
        found = _Found()
        for module in self._modules:
            _walk("", module, found, is_inside_object=False)
        if not self._with_parameters:
            others = {name: value for name, value in found.values.items() if not isinstance(value, nn.Parameter)}
            found.values = others
        return found


def _walk(name: str, value: Any, found: _Found, is_inside_object: bool) -> None:
    """Writes down all tensors, arrays and things that hold them, from ``value`` on."""
    if id(value) in found.seen or isinstance(value, _OPAQUE):
        return
    if isinstance(value, torch.Tensor | np.ndarray):
        found.seen.add(id(value))
        found.values[name or "a tensor"] = value
        return
    is_container = isinstance(value, nn.Module | list | tuple | dict | set | deque)
    if not is_container and (is_inside_object or not hasattr(value, "__dict__")):
        return
    found.seen.add(id(value))
    found.holders.append(value)
    for key, item in _items(value):
        _walk(_join(name, key), item, found, is_inside_object or not is_container)


def _items(holder: Any) -> Iterable[tuple[str, Any]]:
    """What a holder holds, with the ends of the names; a key that may be private text is named by its type."""
    if isinstance(holder, dict):
        items = []
        for key, item in holder.items():
            name = str(key) if isinstance(key, str | int) else type(key).__name__
            items.append((name, item))
        return items
    if isinstance(holder, list | tuple | set | deque):
        return [(f"[{number}]", item) for number, item in enumerate(holder)]
    return list(vars(holder).items())


def _join(name: str, key: str) -> str:
    if key in _UNNAMED:
        return name
    return f"{name}{key}" if key.startswith("[") or not name else f"{name}.{key}"


def _contents(holder: Any) -> Any:
    """A shallow copy; a tuple cannot change."""
    if isinstance(holder, tuple):
        return None
    if isinstance(holder, list | deque):
        return list(holder)
    if isinstance(holder, set):
        return set(holder)
    return dict(holder if isinstance(holder, dict) else vars(holder))


def _refill(holder: Any, contents: Any) -> None:
    if isinstance(holder, tuple):
        return
    is_container = isinstance(holder, list | deque | set | dict)
    target: Any = holder if is_container else vars(holder)
    target.clear()
    if isinstance(holder, list | deque):
        target.extend(contents)
    else:
        target.update(contents)


def _copy(value: _Values) -> _Values:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()


@torch.no_grad()
def _write(value: _Values, copy: _Values) -> None:
    """Puts the values back into the tensor or array itself, which others may hold too."""
    if isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor):
        if value.shape != copy.shape:
            value.data = copy.clone()  # it was resized
        else:
            value.detach().copy_(copy)
    elif isinstance(value, np.ndarray) and isinstance(copy, np.ndarray):
        np.copyto(value, copy)


def _is_same(value: _Values, copy: _Values | None) -> bool:
    """Whether a value is still what its copy says, in shape, dtype and place too; NaN equals NaN here."""
    if isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor):
        if value.shape != copy.shape or value.dtype != copy.dtype or value.device != copy.device:
            return False
        value = value.detach()
        if torch.equal(value, copy):
            return True
        are_both_nan = (value != value) & (copy != copy)
        return bool(((value == copy) | are_both_nan).all())
    if isinstance(value, np.ndarray) and isinstance(copy, np.ndarray):
        if value.shape != copy.shape or value.dtype != copy.dtype:
            return False
        are_both_nan = (value != value) & (copy != copy)
        return bool(np.all((value == copy) | are_both_nan))
    return False
