"""Inner optimizers and parameters around which gradients would leak are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.validation import optimizers


def test_layers_by_name() -> None:
    model = nn.Linear(2, 1)
    assert list(optimizers.named_layers(model.named_parameters())) == ["weight", "bias"]
    with pytest.raises(ValueError, match="twice"):
        optimizers.named_layers([("a", model.weight), ("b", model.weight)])
    with pytest.raises(ValueError, match="complex and sharded"):
        optimizers.named_layers([("a", torch.zeros(2, dtype=torch.complex64))])


def test_all_parameters_must_be_named() -> None:
    model = nn.Linear(2, 1)
    optimizers.check_all_named([model.weight], {"weight": model.weight})
    with pytest.raises(ValueError, match=r"position 1, shape \(1,\)"):
        optimizers.check_all_named([model.weight, model.bias], {"weight": model.weight})


def test_scales_must_be_of_known_parameters() -> None:
    optimizers.check_known({"weight": 1.0}, {"weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="do not exist: bias"):
        optimizers.check_known({"bias": 1.0}, {"weight": torch.zeros(1)})


def test_a_gradient_in_the_state_is_refused() -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = torch.zeros(2)
    inner.state[model.weight]["before"] = buffer.clone()
    optimizers.check_keeps_no_gradient(inner, [buffer])
    inner.state[model.weight]["before"] = buffer[:1]
    with pytest.raises(ValueError, match="keeps .grad itself as 'before'"):
        optimizers.check_keeps_no_gradient(inner, [buffer])


@pytest.mark.parametrize("make", [lambda p: torch.optim.LBFGS(p), lambda p: "sgd"])
def test_optimizers_that_cannot_be_wrapped(make) -> None:
    with pytest.raises(ValueError, match=r"LBFGS|must be a torch\.optim\.Optimizer"):
        optimizers.check_inner(make(nn.Linear(2, 1).parameters()))
