"""Steps for which ε would not hold: refused on all workers, or with a condition that says so."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import edpsgd
from edpsgd import FedAvg, FedSGD, PoissonBatches, PoissonUsers, ShuffledBatches
from edpsgd.ledger import guarantee
from edpsgd.ledger.events import Event, LedgerError
from edpsgd.ledger.records import RunRecord
from edpsgd.sampling.data_order import order_digest
from tests.helpers.common import Bag, assert_std, layers_of, private, set_gradients
from tests.helpers.federation import Point, pushed, training
from tests.helpers.threads import run_workers

DELTA = 1e-5


# -------------------------------------------------------------------- Poisson draws of micro-batches


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 8), (2, 1), (3, 2)])
def test_removing_an_example_from_the_middle_moves_no_other(workers, micro_batches) -> None:
    """Coupled worlds: the neighbour's examples keep the draws of their own, whatever their new index is.

    All draws are a function of (seed, step, index) that is independent between indices, so it is enough that the draws
    of an index depend neither on the number of examples nor on the others: then the law is the same under any order.
    """

    def slots(examples: int) -> dict[tuple[int, int], tuple[int, int]]:
        """(step, index) -> (worker, slot)."""

        def drawn(worker) -> list[list[int]]:
            sampler = PoissonBatches(
                examples, 0.5, steps_per_epoch=30, micro_batches=micro_batches, collective=worker, seed=11
            )
            return list(sampler)

        found = {}
        for rank, of_worker in enumerate(run_workers(workers, drawn)):
            for number, batch in enumerate(of_worker):
                for index in batch:
                    assert (number // micro_batches, index) not in found
                    found[number // micro_batches, index] = rank, number % micro_batches
        return found

    large, small = slots(41), slots(29)
    assert {key: place for key, place in large.items() if key[1] < 29} == small
    neighbours = [(large[s, i], large[s, i + 1]) for s, i in large if (s, i + 1) in large]
    alike = np.mean([a == b for a, b in neighbours])  # a slot that follows from the index would say 0 or 1
    expected = 1 / (workers * micro_batches)
    assert abs(alike - expected) < 5 * np.sqrt(expected * (1 - expected) / len(neighbours))


def test_the_law_of_the_clipped_sum_moves_by_no_more_than_claimed_without_an_example() -> None:
    """K = 8, q = 1: data that lie in wait for the others to move up, by which slots that follow the index move 14 C."""
    slots, trials = 8, 4000
    first = [10.0 * k for k in range(slots)]
    second = [-10.0 * k - 1 for k in range(slots)]
    worlds = {True: [*first, 0.0, *second], False: [*first, *second]}

    def sums(has_it: bool) -> np.ndarray:
        data = np.array(worlds[has_it])
        batches = PoissonBatches(
            len(data), 1.0, micro_batches=slots, steps_per_epoch=trials, seed=int(has_it), collective="local"
        )
        clipped = [np.clip(100 * data[batch].mean(), -1, 1) if batch else 0.0 for batch in batches]
        return np.array(clipped).reshape(trials, slots).sum(1)

    with_it, without = sums(True), sums(False)
    for threshold in np.arange(-8.5, 9.0, 1.0):  # a coupling within 2 C exists only if the tails are nested
        for a, b in ((with_it, without), (without, with_it)):
            assert np.mean(a >= threshold + 2) <= np.mean(b >= threshold) + 5 / np.sqrt(trials)


def test_states_of_seeded_draws_of_another_version_are_refused() -> None:
    batches = PoissonBatches(20, 0.5, seed=3, collective="local")
    state = batches.state_dict()
    planned = list(batches)
    batches.load_state_dict(state)
    batches.set_epoch(0)
    assert list(PoissonBatches(20, 0.5, seed=3, collective="local")) == planned
    old = {name: value for name, value in state.items() if name != "draws"}
    with pytest.raises(ValueError, match="of another version, in which the same seed gave other batches"):
        batches.load_state_dict(old)
    PoissonBatches(20, 0.5, collective="local").load_state_dict(  # draws anew in any case
        {name: value for name, value in old.items() if name != "seed"}
    )


@pytest.mark.parametrize(
    ("run", "neighbours"),
    [
        ({"workers": 1, "batches": {"micro_batches": 1}}, "add or remove one example"),
        ({"workers": 1, "batches": {"micro_batches": 2}}, "blank one example, its index stays"),
        ({"workers": 2, "batches": {"micro_batches": 1}}, "blank one example, its index stays"),
        ({"workers": 2, "batches": {"micro_batches": 2, "slots": "drawn"}}, "add or remove one example"),
        ({"workers": 2, "unit": "example", "batches": {"micro_batches": None}}, "add or remove one example"),
    ],
)
def test_ledgers_in_which_slots_followed_the_index_say_so(run, neighbours) -> None:
    run = {"unit": "micro_batch", **run}
    run["batches"] = {"kind": "poisson", "seeded": False, "order_compared": True, **run["batches"]}
    event = Event("gradients", 0, 1.0, 3, "poisson", 0.1)
    assert guarantee.bound([event], DELTA, [RunRecord.from_settings(run)]).neighbours == neighbours


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


@dataclass
class Said:
    text: str
    kinds: frozenset[str]


class Texts(torch.utils.data.Dataset):
    def __init__(self, order) -> None:
        self.order, self.is_augmented = list(order), False

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict:
        place = self.order[index]
        noise = torch.rand(2) if self.is_augmented else torch.zeros(2)
        return {"text": f"private {place}", "ids": torch.tensor([place]) + noise, "label": np.int64(place)}


@pytest.mark.parametrize("make", [list, Texts, lambda order: [f"private {i}" for i in order]])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda data, worker: ShuffledBatches(data, 4, collective=worker),
        lambda data, worker: PoissonBatches(data, 0.1, collective=worker),
    ],
)
def test_data_in_another_order_are_refused_on_all_workers(make, sampler) -> None:
    def work(worker, order) -> bool:
        made = sampler(make(order(worker)), worker)
        optimizer = private(Bag((5,)), batches=made, collective=worker)
        return made.is_order_compared and "could not compare" not in str(optimizer.epsilon(DELTA))

    rng = [np.random.default_rng(seed).permutation(500).tolist() for seed in range(3)]
    errors = run_workers(3, lambda worker: work(worker, lambda w: rng[w.rank]))
    assert all("or the same in another order" in str(error) for error in errors)
    assert not any("private" in str(error) for error in errors)
    assert run_workers(3, lambda worker: work(worker, lambda w: rng[0])) == [True] * 3


def test_users_in_another_order_are_refused() -> None:
    def work(worker) -> None:
        PoissonUsers([1, 2, 3, 4][:: 1 - 2 * worker.rank], 0.5, collective=worker)

    assert all("the workers have other users, or the same in another order" in str(e) for e in run_workers(2, work))


@pytest.mark.parametrize("data", [40, "augmented"])
def test_data_that_cannot_be_compared_are_a_condition(data) -> None:
    def work(worker) -> str:
        examples = data
        if data == "augmented":
            examples = Texts(range(40))
            examples.is_augmented = True
        batches = ShuffledBatches(examples, 4, collective=worker)
        optimizer = private(Bag((5,)), batches=batches, collective=worker)
        optimizer.set_epoch(0)
        next(iter(batches))
        optimizer.step()
        return str(optimizer.epsilon(DELTA))

    assert all("could not compare the data of the workers" in printed for printed in run_workers(2, work))
    alone = private(Bag((5,)), batches=ShuffledBatches(40, 4, collective="local"), collective="local")
    assert "could not compare" not in str(alone.epsilon(DELTA))


def test_digests_do_not_depend_on_the_process() -> None:
    """Hashes of strings, and so the order of sets, differ between processes; places of objects too."""
    kinds = [f"kind {i}" for i in range(20)]
    items = f"[frozenset({kinds}), {{'x': set({kinds}), 'y': None}}, b'z', 1.5]"
    code = (
        f"from edpsgd.sampling.data_order import order_digest; print(order_digest({items}).hex(), list(set({kinds})))"
    )

    def ask(seed: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        return tuple(done.stdout.split(" ", 1))

    (first, order), (second, other_order) = ask("1"), ask("2")
    assert order != other_order
    assert first == second
    assert order_digest([Said("a", frozenset("xyz"))]) == order_digest([Said("a", frozenset("zyx"))]) is not None
    assert order_digest([object()]) is None


def test_reading_the_data_leaves_random_numbers_and_ledger_alone() -> None:
    examples = Texts(range(40))
    examples.is_augmented = True
    state = torch.get_rng_state()
    assert order_digest(examples) is None
    assert torch.equal(state, torch.get_rng_state())
    batches = run_workers(2, lambda worker: ShuffledBatches(Texts(range(40)), 4, collective=worker))[0]
    assert order_digest(Texts(range(40))).hex() not in json.dumps([batches.describe(), batches.state_dict()])


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
