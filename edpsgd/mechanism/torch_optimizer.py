"""A torch optimizer around another one: groups, state, hooks, checkpoints and copies as on the wrapped optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from edpsgd.validation import optimizers


class OptimizerWrapper(torch.optim.Optimizer):
    """Everything of torch's optimizer interface that has nothing to do with privacy.

    Parameter groups, state and defaults are those of the wrapped optimizer, so that LR schedulers and checkpoints see
    one optimizer. Hooks registered here run around the wrapper's own step and state_dict.
    """

    _inner: torch.optim.Optimizer
    _is_inner_known = False  # whether it was seen to keep no gradient
    _copies = 0  # how many were made of this one
    _kept_by_copies: tuple[str, ...] = ("_inner",)  # attributes; what else there is follows from the state

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        # Optimizer.__init__ would set up groups and state of its own. What else it does, the hooks and
        # the name for the profiler, is also done after unpickling.
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The wrapped optimizer's state."""
        return self._inner.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and the wrapper's own under "edpsgd"."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: dict[str, Any] = {**self._inner.state_dict(), "edpsgd": self._own_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what state_dict() gave; a state that does not fit is refused before anything of it is used."""
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state)
            state = state if replaced is None else replaced
        if "edpsgd" not in state:
            raise ValueError(
                "the state has no 'edpsgd' entry, so it is not that of a PrivateOptimizer: load the state of a plain "
                "optimizer into that optimizer before wrapping it"
            )
        own = state.pop("edpsgd")
        if _group_sizes(state["param_groups"]) != _group_sizes(self.param_groups):
            raise ValueError("the state is that of an optimizer with other parameter groups")
        self._load_own_state(own)  # before the moments of another run could move the model
        self._inner.load_state_dict(state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _step_inner(self, buffers: Sequence[torch.Tensor]) -> None:
        """Steps the wrapped optimizer on what .grad holds, which nothing can use afterwards.

        Args:
            buffers: where .grad may be a view of, which the wrapped optimizer must not keep.
        """
        try:
            self._inner.step()
            if not self._is_inner_known:
                optimizers.check_keeps_no_gradient(self._inner, buffers)
                self._is_inner_known = True
        finally:
            self.zero_grad()

    def _make_inner_state(self, parameters: list[torch.Tensor]) -> None:
        """What hvd.broadcast_optimizer_state() wants of step(): the state exists, no parameter has moved.

        Momentum and the like are made by a step of zero gradients, after which the parameters are set back.
        """
        before = [p.detach().clone() for p in parameters]
        self.zero_grad()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._inner.step()
        torch._foreach_copy_(parameters, before)
        self.zero_grad()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self._kept_by_copies}
        self._copies += 1
        return {**kept, "own": {**self._own_state(), "copy": self._copies}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own_state = state.pop("own")
        self.__dict__.update(state)
        super().__setstate__({})
        self._set_up()
        self._load_own_state(own_state)

    def _set_up(self) -> None:
        """Makes all that is not kept by copies, as in a new optimizer."""
        raise NotImplementedError

    def _own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the wrapper."""
        raise NotImplementedError

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Goes on from what ``_own_state`` gave, or refuses it and changes nothing."""
        raise NotImplementedError


def named_group(param_group: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A parameter group whose parameters are a list, as torch would make it; and the tensors in it."""
    params = param_group["params"]
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    tensors = [item[1] if isinstance(item, tuple) else item for item in listed]  # (name, tensor)
    return {**param_group, "params": listed}, tensors


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    """How many parameters each group has."""
    return [len(group["params"]) for group in groups]
