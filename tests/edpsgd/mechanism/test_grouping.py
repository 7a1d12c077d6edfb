"""From losses of examples to units, and losses that are none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd import PoissonBatches, PoissonUsers, ShuffledBatches
from edpsgd.mechanism import grouping
from edpsgd.mechanism.grouping import empty_units, expected_units, group_examples
from tests.helpers.common import layers_of, private


def losses_of(model: nn.Module, examples: int = 4) -> torch.Tensor:
    return model(torch.arange(2.0 * examples).reshape(examples, 2)).square().sum(1)


def test_a_mean_over_a_batch_is_not_one_example() -> None:
    model = nn.Linear(2, 1)
    optimizer = private(model, unit="example", divisor=4)
    before = layers_of(model)
    losses_of(model).mean().backward()
    with pytest.raises(RuntimeError, match="a gradient that was not closed as that of one example"):
        optimizer.step()
    assert all(torch.equal(before[name], p.detach()) for name, p in model.named_parameters())
    for loss in losses_of(model):
        loss.backward(retain_graph=True)
        optimizer.accumulate()
    optimizer.step()
    optimizer.backward(losses_of(model))
    optimizer.step()
    optimizer.step()  # no data
    assert sum(event.steps for event in optimizer.ledger.events) == 3


def test_losses_of_tokens_are_compared_with_the_draw() -> None:
    model = nn.Linear(2, 1)
    batches = PoissonBatches(8, 1.0, unit="example", collective="local")
    optimizer = private(model, unit="example", batches=batches, collective="local")
    optimizer.set_epoch(0)
    assert len(next(iter(batches))) == 8
    optimizer.backward(losses_of(model, 16))
    with pytest.raises(RuntimeError, match="the step has 16 micro-batches, and the sampler made 8 for it"):
        optimizer.step()


@pytest.mark.parametrize("unit", [{"unit": "example", "divisor": 4}, {"unit": "micro_batch"}])
def test_two_optimizers_on_one_loss(unit) -> None:
    body, head = nn.Linear(2, 3), nn.Linear(3, 1)
    first, second = private(body, **unit), private(head, **unit)
    for _ in range(3):
        losses = losses_of(nn.Sequential(body, head))
        first.backward(losses)
        with pytest.raises(RuntimeError, match=r"went through backward\(\) of another PrivateOptimizer"):
            second.backward(losses)
        with pytest.raises(RuntimeError, match="every example would count twice"):
            first.backward(losses)
        first.step()
    second.backward(losses_of(nn.Sequential(body, head)))
    second.step()


def drawn(batches) -> list[int]:
    batches.set_epoch(0)
    return next(iter(batches))


def test_without_a_sampler_losses_are_one_micro_batch_or_what_the_user_says() -> None:
    numbers, count = group_examples(torch.zeros(3), None, None, "micro_batch", None)
    assert numbers is not None
    assert (numbers.tolist(), count) == ([0, 0, 0], 1)
    units = torch.tensor([1, 0, 1])
    assert group_examples(torch.zeros(3), units, 4, "micro_batch", None) == (units, 4)


def test_examples_are_units_of_their_own() -> None:
    assert group_examples(torch.zeros(3), None, None, "example", None) == (None, 3)
    with pytest.raises(ValueError, match="units are for unit='micro_batch'"):
        group_examples(torch.zeros(3), torch.arange(3), None, "example", None)
    with pytest.raises(ValueError, match=r"use edpsgd\.Federated for users"):
        group_examples(torch.zeros(3), None, None, "user", None)


def test_a_sampler_knows_its_micro_batches() -> None:
    batches = ShuffledBatches(8, 2, micro_batches=3, together=True, collective="local")
    assert len(drawn(batches)) == 6
    numbers, count = group_examples(torch.zeros(6), None, None, "micro_batch", batches)
    assert numbers is not None
    assert (numbers.tolist(), count) == ([0, 0, 1, 1, 2, 2], 3)
    with pytest.raises(ValueError, match="this one knows its micro-batches"):
        group_examples(torch.zeros(6), torch.arange(6), None, "micro_batch", batches)


def test_the_last_step_of_an_epoch_has_empty_units() -> None:
    batches = ShuffledBatches(5, 1, micro_batches=3, together=True, collective="local")
    batches.set_epoch(0)
    steps = iter(batches)
    next(steps)
    batches.take()
    assert len(next(steps)) == 2
    numbers, count = group_examples(torch.zeros(2), None, None, "example", batches)
    assert numbers is not None
    assert (numbers.tolist(), count) == ([0, 1], 3)


def test_units_of_a_step_without_gradients() -> None:
    assert [empty_units(None, closed) for closed in (0, 1, 2)] == [1, 0, 0]
    loose = ShuffledBatches(8, 2, micro_batches=3, collective="local")
    assert [empty_units(loose, closed) for closed in (0, 2, 3)] == [1, 1, 0]
    together = PoissonBatches(8, 1e-9, steps_per_epoch=1, micro_batches=3, together=True, collective="local")
    assert drawn(together) == []
    assert [empty_units(together, closed) for closed in (0, 1, 3)] == [3, 2, 0]


def test_the_expected_number_of_units_is_public() -> None:
    users = PoissonUsers(10, 0.5, collective="local")
    assert expected_units(None, "micro_batch", None) is None
    assert expected_units(8.0, "example", None) == 8.0
    assert expected_units(None, "user", users) == users.expected_batch
    assert expected_units(3.0, "user", users) == 3.0


def test_a_claim_can_be_withdrawn() -> None:
    model, owner = nn.Linear(2, 1), object()
    losses = losses_of(model)
    grouping.claim_losses(losses, owner)
    grouping.release_losses(losses)
    grouping.claim_losses(losses, owner)
    with pytest.raises(RuntimeError, match="every example would count twice"):
        grouping.claim_losses(losses, owner)
    first, second = (losses * 1.0).split(2)  # outputs of one operation
    grouping.claim_losses(first, owner)
    grouping.claim_losses(second, owner)


@pytest.mark.parametrize(("losses", "found"), [(torch.zeros(2, 3), r"shape \(2, 3\)"), ([1.0], "a list")])
def test_losses_are_a_vector(losses, found) -> None:
    with pytest.raises(ValueError, match=f"a tensor of shape \\(B,\\), got {found}"):
        grouping.check_one_for_each(losses)
