"""Checkpoints and copies: training goes on as if it had not stopped, and no secret is in them."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

import edpsgd
from edpsgd.checkpoints import Progress, load_from_root
from tests.helpers.common import Bag, assert_same, layers_of, private
from tests.helpers.small_steps import build, train
from tests.helpers.threads import run_workers


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_from_the_same_place(copy_of) -> None:
    model = build()
    optimizer = private(model, torch.optim.Adam(model.parameters()), seed=3, noise_decay=edpsgd.LinearDecay(0.5))
    lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps step()
    optimizer.set_epoch(2)
    train(model, optimizer, 3)
    twin_model, twin = copy_of((model, optimizer))
    assert twin.param_groups[0]["params"][0] is next(twin_model.parameters())
    train(model, optimizer, 3)
    train(twin_model, twin, 3)
    assert_same(twin_model, layers_of(model), tolerance=0.0)
    assert [e.steps for e in optimizer.ledger.events] == [6]
    assert [e.steps for e in twin.ledger.events] == [3, 3]


def test_state_dict_round_trip_through_a_file(tmp_path) -> None:
    model = build()
    optimizer = private(model, torch.optim.Adam(model.parameters()), layer_scaling=edpsgd.FirstStepNorms(), seed=8)
    optimizer.set_epoch(1)
    train(model, optimizer, 4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)  # plain data and tensors only

    again = build()
    again.load_state_dict(saved["model"])
    resumed = private(again, torch.optim.Adam(again.parameters()), layer_scaling=edpsgd.FirstStepNorms(), seed=8)
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, 4)
    train(again, resumed, 4)
    assert_same(again, layers_of(model), tolerance=0.0)


def test_checkpoints_hold_no_generator_and_the_seed_only_if_given() -> None:
    model = build()
    without, with_seed = private(model), private(model, seed=5)
    for optimizer in (without, with_seed):
        train(model, optimizer, 1)
    assert set(without.state_dict()["edpsgd"]) == {
        "format", "epoch", "step", "scales", "discarded", "clip_norm", "ledger"
    }  # fmt: skip
    assert with_seed.state_dict()["edpsgd"]["seed"] == 5
    assert without._source._secret.hex() not in repr(without.state_dict())
    assert without._source._secret not in pickle.dumps(without)


def test_state_of_a_plain_optimizer_is_refused() -> None:
    model = build()
    plain = torch.optim.Adam(model.parameters())
    train(model, plain, 1)
    with pytest.raises(ValueError, match="load the state of a plain optimizer"):
        private(model, torch.optim.Adam(model.parameters())).load_state_dict(plain.state_dict())


def test_a_seed_from_a_checkpoint_is_marked() -> None:
    seeded = private(Bag(), seed=5)
    seeded.step()
    optimizer = private(Bag())
    optimizer.load_state_dict(seeded.state_dict())
    assert [run.seeded for run in optimizer.ledger.runs] == [True, False, True]


def test_the_format_of_a_state_is_checked() -> None:
    optimizer = private(Bag())
    state = optimizer.state_dict()
    state["edpsgd"] = {**state["edpsgd"], "format": 2}
    with pytest.raises(ValueError, match="the state has format 2, this version reads 1"):
        optimizer.load_state_dict(state)


def test_a_state_is_json_and_comes_back() -> None:
    """Progress, clip norm and a given seed are in it."""
    optimizer = private(Bag(), seed=4, clip_norm=2.0)
    optimizer.set_epoch(3)
    optimizer.step()
    state = optimizer.state_dict()["edpsgd"]
    assert json.loads(json.dumps(state)) == state
    resumed = private(Bag(), clip_norm=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    assert (resumed.epoch, resumed.clip_norm, resumed.discarded) == (3, 2.0, 0)
    assert resumed._progress == Progress(epoch=3, steps=1)
    assert any(run.clip_norm_restored for run in resumed.ledger.runs)


def test_all_workers_load_the_state_of_the_root() -> None:
    """Their samplers count the moves of the one that was moved most, so that they draw alike."""

    def work(worker) -> tuple[int, int]:
        bookkeeping = SimpleNamespace(moves=5 - worker.rank)
        loaded: list[dict[str, int]] = []
        load_from_root(1, worker, bookkeeping, {"step": worker.rank}, loaded.append)
        return loaded[0]["step"], bookkeeping.moves

    assert run_workers(3, work) == [(1, 5)] * 3


def test_a_state_that_one_worker_cannot_load_is_an_error_on_all() -> None:
    def work(worker) -> None:
        def load(state: dict[str, int]) -> None:
            if worker.rank == 1:
                raise ValueError("it does not fit")

        load_from_root(0, worker, SimpleNamespace(moves=0), {}, load)

    assert all("it does not fit" in str(error) for error in run_workers(2, work))
