"""Steps for which ε would not hold: refused on all workers, or with a condition that says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd import FedAvg, FedSGD, PoissonBatches, PoissonUsers, ShuffledBatches
from edpsgd.ledger.events import LedgerError
from tests.helpers.common import Bag, assert_std, layers_of, private, set_gradients
from tests.helpers.federation import Point, pushed, training
from tests.helpers.threads import run_workers

DELTA = 1e-5


# -------------------------------------------------------------------- Poisson draws of micro-batches


# -------------------------------------------------------------------- workers that change


@pytest.mark.parametrize("scaling", [None, edpsgd.FirstStepNorms()])
def test_workers_that_swap_their_places_are_refused_on_all(tmp_path, scaling) -> None:
    def work(worker) -> tuple[object, bool]:
        model = Bag((5,))
        optimizer = private(model, collective=worker, ledger=tmp_path / "ledger.jsonl", layer_scaling=scaling)
        optimizer.set_epoch(0)
        if scaling is None:
            optimizer.step()
        before = layers_of(model)["p0"]
        if worker.rank < 2:
            worker.rank = 1 - worker.rank
        set_gradients(model, 1.0)
        try:
            optimizer.step()
        except Exception as error:
            return str(error), torch.equal(before, model.p0.detach())
        return None, False

    answers = run_workers(3, work)
    assert all("whether the workers are those of the start" in str(error) for error, _ in answers)
    assert all("was worker 0 of 3 when its optimizer was made, and is worker 1" in str(error) for error, _ in answers)
    assert all(unchanged for _, unchanged in answers)


def test_a_worker_that_is_left_alone_does_not_go_on_by_itself(tmp_path) -> None:
    """The file belonged to worker 0 of before: steps would be released that no file counts."""
    path, kept = tmp_path / "ledger.jsonl", {}

    def work(worker) -> None:
        optimizer = private(Bag((5,)), collective=worker, ledger=path)
        optimizer.set_epoch(0)
        optimizer.step()
        kept[worker.rank] = worker, optimizer, copy.deepcopy(optimizer.state_dict())

    run_workers(2, work)
    kept[0][1].ledger.close()  # worker 0 is gone
    worker, survivor, state = kept[1]
    worker.rank, worker.size = 0, 1
    worker.gather, worker.sum_ = lambda value: [value], lambda tensors: None
    with pytest.raises(RuntimeError, match="was worker 1 of 2 when its optimizer was made, and is worker 0 of 1 now"):
        survivor.step()
    assert sum(event.steps for event in edpsgd.Ledger.read(path).events) == 1
    survivor.load_state_dict(state)
    survivor.set_epoch(1)
    survivor.step()
    survivor.ledger.close()
    on_disk = edpsgd.Ledger.read(path)
    assert sum(event.steps for event in on_disk.events) == 2
    assert on_disk.runs[-1].workers == 1


def test_a_sampler_stays_with_the_worker_that_it_was_made_for() -> None:
    def work(worker) -> object:
        optimizer = private(Bag((5,)), collective=worker, batches=ShuffledBatches(range(8), 2, collective=worker))
        state = copy.deepcopy(optimizer.state_dict())
        worker.rank = 1 - worker.rank
        optimizer.load_state_dict(state)
        return None

    assert all("the sampler was made for another worker" in str(error) for error in run_workers(2, work))


# -------------------------------------------------------------------- single examples


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


def test_a_mean_over_a_batch_on_one_worker_stops_all() -> None:
    def work(worker) -> None:
        model = nn.Linear(2, 1)
        optimizer = private(model, unit="example", divisor=8, collective=worker)
        if worker.rank == 1:
            losses_of(model).mean().backward()
        optimizer.step()

    assert all("disagree on whether the step may be taken" in str(error) for error in run_workers(2, work))


@pytest.mark.parametrize("workers", [1, 3])
def test_losses_of_tokens_are_not_losses_of_examples(workers) -> None:
    def work(worker) -> object:
        model = nn.Linear(2, 1)
        optimizer = private(model, unit="example", divisor=4 * workers, collective=worker)
        optimizer.backward(losses_of(model, 4))
        optimizer.step()
        before = layers_of(model)
        optimizer.backward(losses_of(model, 4 * 25))
        try:
            optimizer.step()
        except ValueError as error:
            assert all(torch.equal(before[name], p.detach()) for name, p in model.named_parameters())
            return str(error)
        return None

    said = f"the step had {100 * workers} examples over all workers, and divisor says that {4 * workers} are expected"
    assert all(said in str(answer) for answer in run_workers(workers, work))


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


# -------------------------------------------------------------------- conditions


def test_the_number_of_micro_batches_is_the_users_word() -> None:
    def condition(**settings) -> str:
        optimizer = private(Bag((5,)), **settings)
        optimizer.step()
        return str(optimizer.epsilon(DELTA))

    assert "nor that of micro-batches in a step (which backward() takes from `units`" in condition()
    assert "micro-batches in a step (" not in condition(unit="example", divisor=4)
    assert "the number of steps does not depend on the data" in condition(unit="example", divisor=4)


def followed(optimizer) -> bool:
    return any("after clip_fraction was read" in text for text in optimizer.epsilon(DELTA).conditions)


def test_a_clip_norm_that_is_changed_after_a_look_at_the_fraction() -> None:
    model = Bag((5,))
    optimizer = private(model)

    def step(one) -> None:
        set_gradients(model, 1.0)
        one.step()

    step(optimizer)
    optimizer.clip_norm = 2.0  # a schedule
    step(optimizer)
    assert not followed(optimizer)
    assert optimizer.clip_fraction >= 0
    step(optimizer)
    assert not followed(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.clip_norm = 3.0
    step(optimizer)
    assert followed(optimizer)
    resumed = private(model)
    resumed.load_state_dict(state)
    step(resumed)
    assert not followed(resumed)
    resumed.clip_norm = 1.0
    step(resumed)
    assert followed(resumed)


def test_a_fraction_that_another_worker_has_read(tmp_path) -> None:
    def work(worker) -> bool:
        optimizer = private(Bag((5,)), collective=worker, ledger=tmp_path / "ledger.jsonl")
        optimizer.step()
        if worker.rank == 1:
            optimizer.clip_fraction  # noqa: B018
        optimizer.step()
        optimizer.clip_norm = 2.0
        optimizer.step()
        return followed(optimizer)

    assert run_workers(2, work) == [True, True]


def test_a_fraction_is_not_read_when_the_ledger_is_closed(tmp_path) -> None:
    """Nothing could say that it was, and the next run on the same ledger may follow from it."""
    model = Bag((5,))
    optimizer = private(model, ledger=tmp_path / "ledger.jsonl")
    set_gradients(model, 1.0)
    optimizer.step()
    optimizer.ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        _ = optimizer.clip_fraction


# -------------------------------------------------------------------- clip fraction of users


@pytest.mark.parametrize("local", [FedSGD(1.0), FedAvg(1.0, epochs=2)])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_the_clip_fraction_of_users_counts_their_own_updates(local, clipping) -> None:
    sizes = [100.0, 0.01, 50.0, 0.02, 1000.0]
    model = Point()
    users = PoissonUsers(len(sizes) + 1, 1.0, collective="local")
    federated = training(model, users, local, clip_norm=1.0, clipping=clipping)
    direction = torch.ones(5) / 5**0.5
    federated.round(lambda user: [sizes[user] * direction] if user < len(sizes) else [], pushed(model))
    assert federated.optimizer.clip_fraction == 3 / 5  # and the user without data does not count


# -------------------------------------------------------------------- data in another order


# -------------------------------------------------------------------- other settings


@pytest.mark.parametrize("clip_norm", [3e4, 1.0, 1e-7])
@pytest.mark.parametrize("workers", [1, 4])
def test_noise_keeps_its_law_in_float16(clip_norm, workers) -> None:
    """However large or small C/divisor is: neither bounded by the largest number of float16, nor rounded away."""

    def work(worker) -> torch.Tensor:
        model = Bag((20000,))
        optimizer = private(
            model,
            unit="example",
            divisor=1.0,
            clip_norm=clip_norm,
            compression="fp16",
            noise_placement="per_worker",
            collective=worker,
            seed=3,
        )
        optimizer.step()
        return model.p0.detach()

    moved = run_workers(workers, work)
    assert all(torch.equal(moved[0], other) for other in moved)
    assert_std(moved[0] / clip_norm, 1.0)


def test_a_ledger_file_on_one_worker_only_is_refused_on_all(tmp_path) -> None:
    def work(worker) -> None:
        private(Bag((5,)), collective=worker, ledger=tmp_path / "ledger.jsonl" if worker.rank else None)

    errors = run_workers(2, work)
    assert all("the workers disagree on whether there is a ledger file" in str(error) for error in errors)


def test_given_scales_are_copied() -> None:
    model, scales = Bag((5, 5)), {"p0": 1.0, "p1": 1.0}
    optimizer = private(model, layer_scaling=scales)
    scales["p1"] = 1e6
    model.p1.requires_grad_(False)
    model.p1.requires_grad_(True)
    optimizer._lay_out()  # as after a parameter was frozen
    assert optimizer._layers.scales == [1.0, 1.0]
