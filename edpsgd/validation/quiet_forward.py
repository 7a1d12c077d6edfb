"""Forward passes without dropout: the same examples give the same losses, and all else is as in training."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from edpsgd.validation.module_state import Snapshot

_DROPOUTS = {
    f"{name}{end}"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for end in ("", "_")
} | {"dropout1d", "dropout2d", "dropout3d"}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_SDPA_DROPOUT = 4  # the place of dropout_p among the arguments of scaled_dot_product_attention
_PRECISIONS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # from fine to coarse


class WithoutDropout(TorchFunctionMode):
    """Switches dropout off in every function of torch, and notes in which precision and shapes they compute.

    Modules that draw by other means are told by their names (``DropPath``, ``StochasticDepth``) in quiet_training.

    Attributes:
        precision: the coarsest dtype that any result had.
        sizes: how often each size was seen in one of the first two dimensions while the other one was 1; with a
            single example in the batch, its number of tokens is among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.precision = torch.float64
        self.sizes: Counter[int] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of every function."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "native_dropout":
            values = args[0] if args else kwargs["input"]
            return values, torch.ones_like(values, dtype=torch.bool)
        if name in _RECURRENT:  # the only float among their arguments, wherever it stands
            args = [0.0 if isinstance(value, float) else value for value in args]
        elif name == "scaled_dot_product_attention":
            args = [0.0 if place == _SDPA_DROPOUT else value for place, value in enumerate(args)]
            kwargs.pop("dropout_p", None)
        elif name == "multi_head_attention_forward":
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        result = func(*args, **kwargs)
        self._look_at(result)
        return result

    def _look_at(self, result: Any) -> None:
        if isinstance(result, tuple | list):
            for part in result:
                self._look_at(part)
        if not isinstance(result, torch.Tensor):
            return
        if result.dim() >= 2 and 1 in result.shape[:2]:
            self.sizes.update(result.shape[:2])
        if result.is_floating_point():
            self.precision = _coarser(self.precision, _effective_precision(result))


def _effective_precision(result: torch.Tensor) -> torch.dtype:
    """That of products: float32 may be rounded to 10 bits (TF32), or to bfloat16, before it is multiplied."""
    if result.dtype is not torch.float32:
        return result.dtype
    products = torch.get_float32_matmul_precision()
    if products == "medium":
        return torch.bfloat16
    is_tf32 = products == "high" or torch.backends.cudnn.allow_tf32
    return torch.float16 if result.is_cuda and is_tf32 else torch.float32


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Unknown ones (of 8 bits) count as the coarsest."""
    places = [_PRECISIONS.index(dtype) if dtype in _PRECISIONS else len(_PRECISIONS) - 1 for dtype in (one, other)]
    return _PRECISIONS[max(places)]


@dataclass(frozen=True)
class QuietTraining:
    """What goes on while dropout is off.

    Attributes:
        watch: the mode that switches it off.
        before: modules as they were before.
        start: the same in training mode, without parameters: from here every call can begin anew.
    """

    watch: WithoutDropout
    before: Snapshot
    start: Snapshot


@contextmanager
def quiet_training(modules: Sequence[nn.Module]) -> Iterator[QuietTraining]:
    """Training mode without dropout; modules and all random generators are put back as they were afterwards."""
    gradients = [(p, p.grad) for module in modules for p in module.parameters()]
    before = Snapshot(modules)
    try:
        for module in modules:
            module.train()
            for part in module.modules():
                if _is_dropout(part):
                    part.training = False
        with _kept_generators(), WithoutDropout() as watch, torch.enable_grad():
            yield QuietTraining(watch, before, Snapshot(modules, with_parameters=False))
    finally:
        before.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _is_dropout(module: nn.Module) -> bool:
    """By its name, if it is nothing else: a network that has dropout in its name must stay in training mode."""
    name = str(getattr(module, "original_name", type(module).__name__)).lower()
    is_leaf = next(module.children(), None) is None and next(module.parameters(), None) is None
    return is_leaf and ("drop" in name or "stochasticdepth" in name)


@contextmanager
def _kept_generators() -> Iterator[None]:
    """The global random generators of torch (on all devices), numpy and Python go on afterwards as if never used."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def seed_generators(seed: int) -> None:
    """Lets the global generators begin anew."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
