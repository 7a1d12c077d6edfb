"""A torch optimizer around another one: groups, state, hooks, checkpoints and copies as on the wrapped optimizer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class OptimizerWrapper(torch.optim.Optimizer):
    """Everything of torch's optimizer interface that has nothing to do with privacy.

    Parameter groups, state and defaults are those of the wrapped optimizer, so that LR schedulers and checkpoints see
    one optimizer. Hooks registered here run around the wrapper's own step and state_dict.
    """

    _inner: torch.optim.Optimizer

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        # Optimizer.__init__ would set up groups and state of its own; what remains of it is what unpickling does.
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
        """Loads what state_dict() gave, on one worker or on all."""
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
        if [len(group["params"]) for group in state["param_groups"]] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the state is that of an optimizer with other parameter groups")
        self._load_own_state(own)  # refuses what does not belong to this run, before anything of it can reach the model
        self._inner.load_state_dict(state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _make_inner_state(self, parameters: list[torch.Tensor]) -> None:
        """What hvd.broadcast_optimizer_state() wants of step(): the state exists, no parameter has moved."""
        before = [p.detach().clone() for p in parameters]
        self.zero_grad()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._inner.step()
        torch._foreach_copy_(parameters, before)
        self.zero_grad()

    def _own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load_own_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError
