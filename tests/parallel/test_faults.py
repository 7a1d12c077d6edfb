"""What goes wrong on one worker: the others neither hang nor drift apart, and nothing leaks."""

from __future__ import annotations

import copy
import math
import os
import warnings

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd.distributed.collectives import Torch
from tests.helpers.common import Bag, assert_same, assert_std, layers_of, private, quiet, set_gradients


def assert_workers_agree(workers, model: nn.Module) -> None:
    first = workers.gather(layers_of(model))[0]
    assert_same(model, first, tolerance=0.0)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("position", [0, 1])
def test_a_bad_micro_batch_counts_as_zero(workers, bad, clipping, position) -> None:
    """On worker 0, one of two micro-batches; the divisor stays."""
    model = Bag()
    optimizer = private(model, clip_norm=1e3, noise_multiplier=0.0, clipping=clipping)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for k in range(2):
                set_gradients(model, 1.0)
                if workers.rank == 0 and k == position:
                    model.p1.grad[3] = bad
                optimizer.accumulate()
            optimizer.step()
    expected = -2 * (2 * workers.size - 1) / (2 * workers.size)
    assert_same(model, {name: torch.full_like(p, expected) for name, p in model.named_parameters()})
    assert optimizer.discarded == 2
    assert len([w for w in caught if "NaN" in str(w.message)]) == 1
    assert_workers_agree(workers, model)


def test_a_bad_micro_batch_is_noised_all_the_same(workers) -> None:
    model = Bag()
    optimizer = private(model, seed=1)
    set_gradients(model, math.nan)
    with quiet():
        optimizer.step()
    for parameter in model.parameters():
        assert_std(parameter.detach(), 2.0 / workers.size)
    assert optimizer.ledger.events[0].steps == 1
    assert_workers_agree(workers, model)


def scaled_training() -> tuple[nn.Linear, torch.amp.GradScaler, edpsgd.PrivateOptimizer]:
    """A model of zeros, and a scaler that halves or doubles its scale at every step."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = private(model, clip_norm=1e3, noise_multiplier=0.0)
    return model, scaler, optimizer


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_overflow_on_one_worker(workers, unscale) -> None:
    """No data-dependent number of steps: the worker that overflows still steps, noises and charges."""
    model, scaler, optimizer = scaled_training()
    inputs = torch.ones(2, 4) * (math.inf if workers.rank == workers.size - 1 else 1.0)
    scaler.scale(model(inputs).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with quiet():
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (512.0 if workers.rank == workers.size - 1 else 2048.0)
    assert_same(model, {"weight": torch.full((1, 4), -2.0 * (workers.size - 1) / workers.size)})
    assert (optimizer.discarded, optimizer.ledger.events[0].steps) == (1, 1)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()  # scales now differ between the workers
    scaler.step(optimizer)
    assert_same(model, {"weight": torch.full((1, 4), -2.0 * (workers.size - 1) / workers.size - 2.0)})


@pytest.mark.parametrize("closed_by_step", [False, True])
def test_grad_scaler_with_several_micro_batches(workers, closed_by_step) -> None:
    model, scaler, optimizer = scaled_training()
    for k in range(3):
        bad = workers.rank == 0 and k == 1
        scaler.scale(model(torch.ones(2, 4) * (math.inf if bad else 1.0)).sum()).backward()
        if k < 2 or not closed_by_step:
            optimizer.accumulate(scaler=scaler)
    with quiet():
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (512.0 if workers.rank == 0 else 2048.0)
    assert_same(model, {"weight": torch.full((1, 4), -2.0 * (3 * workers.size - 1) / (3 * workers.size))})


def test_a_worker_without_data(workers) -> None:
    model = Bag()
    optimizer = private(model, clip_norm=1e3, noise_multiplier=0.0)
    if workers.rank == 0:
        set_gradients(model, 1.0)
    optimizer.step()
    assert_same(model, {name: torch.full_like(p, -1.0 / workers.size) for name, p in model.named_parameters()})


def test_a_worker_short_of_data_contributes_its_k(workers) -> None:
    model = Bag()
    optimizer = private(model, clip_norm=1e3, noise_multiplier=0.0)
    for k in range(3):
        if workers.rank != 0 or k == 0:
            set_gradients(model, 1.0)
        optimizer.accumulate()
    optimizer.step()
    expected = -(3.0 * (workers.size - 1) + 1) / (3 * workers.size)
    assert_same(model, {name: torch.full_like(p, expected) for name, p in model.named_parameters()})


DIFFERENT = {
    "clip_norm": {"clip_norm": 2.0},
    "noise_multiplier": {"noise_multiplier": 0.1},
    "noise_decay": {"noise_decay": edpsgd.LinearDecay(0.1)},
    "clipping": {"clipping": "per_layer"},
    "layer_scaling": {"layer_scaling": edpsgd.FirstStepNorms()},
    "noise_placement": {"noise_placement": "per_worker"},
    "seeded": {"seed": 1},
    "noise": {"noise": "paper"},
    "unit": {"unit": "example", "divisor": 8},
}


@pytest.mark.parametrize("setting", DIFFERENT)
def test_different_settings(workers, setting) -> None:
    if workers.size == 1:
        pytest.skip("needs several workers")
    settings = DIFFERENT[setting] if workers.rank == workers.size - 1 else {}
    with pytest.raises(ValueError, match=f"the workers disagree on {setting}: worker 0: .*; worker 1:") as caught:
        private(Bag(), **settings)
    assert len(set(workers.gather(str(caught.value)))) == 1


@pytest.mark.parametrize("sizes", [(3000, 1500, 6001), (3000, 1500), (1500, 3000, 6000)])
def test_different_models(workers, sizes) -> None:
    if workers.size == 1:
        pytest.skip("needs several workers")
    model = Bag(sizes) if workers.rank == 0 else Bag()
    with pytest.raises(ValueError, match="the workers disagree on parameter"):
        private(model)


def test_frozen_on_one_worker_only(workers) -> None:
    if workers.size == 1:
        pytest.skip("needs several workers")
    model = Bag()
    model.p1.requires_grad_(workers.rank > 0)
    with pytest.raises(ValueError, match="the workers disagree on parameter 1: .*frozen.*trained"):
        private(model)


def test_an_error_on_one_worker_is_raised_on_all(workers) -> None:
    with pytest.raises(ValueError, match="clip_norm must be a finite number > 0"):
        private(Bag(), clip_norm=-1.0 if workers.rank == 0 else 1.0)


def test_a_ledger_that_cannot_be_opened_is_an_error_on_all(workers, tmp_path) -> None:
    with pytest.raises((ValueError, OSError), match="No such file"):
        private(Bag(), ledger=tmp_path / "nowhere" / "ledger.jsonl")


@pytest.mark.parametrize("what", ["the number of micro-batches", "the epoch"])
def test_steps_that_differ(workers, what) -> None:
    """Noticed in the step's own message, before the model moves, and the optimizer can go on."""
    if workers.size == 1:
        pytest.skip("needs several workers")
    model = Bag()
    optimizer = private(model)
    optimizer.set_epoch(0)
    if workers.rank == 1:
        if what == "the epoch":
            optimizer.set_epoch(1)
        else:
            optimizer.accumulate()
            set_gradients(model)
    with pytest.raises(ValueError, match=f"the workers disagree on {what}.*: worker 0: .*; worker 1:"):
        optimizer.step()
    assert all(p.abs().sum() == 0 for p in model.parameters())
    optimizer.set_epoch(2)
    optimizer.step()
    assert_workers_agree(workers, model)


def test_checkpoint_loaded_on_one_worker_only_is_noticed(workers) -> None:
    if workers.size == 1:
        pytest.skip("needs several workers")
    optimizer = private(Bag())
    optimizer.set_epoch(0)
    optimizer.step()
    model = Bag()
    resumed = private(model)
    if workers.rank == 0:
        resumed.load_state_dict(optimizer.state_dict())
    resumed.set_epoch(0)
    with pytest.raises(ValueError, match="the workers disagree on the step counter"):
        resumed.step()
    assert all(p.abs().sum() == 0 for p in model.parameters())


def test_parameters_frozen_later_on_one_worker_only(workers) -> None:
    """Of the same size, so that the messages fit: only what rides along tells that they are not the same."""
    if workers.size == 1:
        pytest.skip("needs several workers")
    model = Bag((2000, 2000, 30))
    optimizer = private(model)
    optimizer.step()
    before = layers_of(model)
    (model.p0 if workers.rank == 0 else model.p1).requires_grad_(False)
    with pytest.raises(ValueError, match="the workers disagree on the trained parameters"):
        optimizer.step()
    assert_same(model, before, tolerance=0.0)


def test_an_empty_worker_with_a_grad_scaler(workers) -> None:
    model, scaler, optimizer = scaled_training()
    if workers.rank != 0:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    optimizer.accumulate(scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0
    assert_same(model, {"weight": torch.full((1, 4), -2.0 * (workers.size - 1) / workers.size)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_model_stays_finite_in_half_precision(workers, dtype) -> None:
    model = Bag().to(dtype)
    compression = "fp16" if dtype == torch.float32 else None
    optimizer = private(model, clip_norm=1e6, compression=compression, noise_placement="per_worker")
    set_gradients(model, 100.0)
    optimizer.step()
    gradients = workers.gather([torch.isfinite(p).all().item() for p in model.parameters()])
    assert all(all(finite) for finite in gradients)


def test_examples_as_units_may_differ_in_number(workers) -> None:
    model = Bag()
    optimizer = private(model, unit="example", divisor=10, clip_norm=1e3, noise_multiplier=0.0)
    for _ in range(workers.rank + 1):
        set_gradients(model, 1.0)
        optimizer.accumulate()
    optimizer.step()
    examples = workers.size * (workers.size + 1) / 2
    assert_same(model, {name: torch.full_like(p, -examples / 10) for name, p in model.named_parameters()})


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("case", ["fresh", "resumed everywhere", "resumed on worker 0"])
@pytest.mark.parametrize("scaling", [None, edpsgd.FirstStepNorms(1.0)], ids=["unscaled", "measured"])
def test_broadcast_optimizer_state(hvd, workers, inner, case, scaling) -> None:
    def build():
        model = Bag()
        return model, private(model, inner(model.parameters(), lr=0.1), layer_scaling=scaling)

    trained, optimizer = build()
    optimizer.set_epoch(3)
    for _ in range(3):
        set_gradients(trained, 1.0)
        optimizer.step()
    checkpoint = workers.gather(copy.deepcopy(optimizer.state_dict()))[0]

    model, resumed = build()
    if case == "resumed everywhere" or (case == "resumed on worker 0" and workers.rank == 0):
        resumed.load_state_dict(checkpoint)
    charged = sum(e.steps for e in resumed.ledger.events)
    before = layers_of(model)
    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    assert_same(model, before, tolerance=0.0)  # AdamW would have decayed the weights
    expected = 0 if case == "fresh" else sum(e["steps"] for e in checkpoint["edpsgd"]["ledger"]["events"])
    assert sum(e.steps for e in resumed.ledger.events) == expected
    assert charged in (0, expected)
    state = resumed.state_dict()
    own = workers.gather(state["edpsgd"])
    assert all(other == own[0] for other in own)
    if case != "fresh" and inner is not torch.optim.SGD:
        for index, values in checkpoint["state"].items():
            for name, value in values.items():
                assert torch.equal(torch.as_tensor(state["state"][index][name]), torch.as_tensor(value))
    resumed.set_epoch(4)
    for _ in range(2):
        set_gradients(model, 1.0)
        resumed.step()
    assert_workers_agree(workers, model)


def test_broadcast_leaves_no_raw_gradient_in_the_state(hvd) -> None:
    model = Bag()
    optimizer = private(model, torch.optim.Adam(model.parameters()))
    set_gradients(model, 7.0)
    model.p1.requires_grad_(False)  # with its raw gradient still there
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model.p1 not in optimizer.state
    assert all(state["exp_avg"].abs().sum() == 0 for state in optimizer.state.values())


def test_a_ledger_that_does_not_fit_is_an_error_on_all_in_a_broadcast(hvd, workers) -> None:
    if workers.size == 1:
        pytest.skip("needs several workers")
    optimizer = private(Bag())
    if workers.rank == 1:  # as if it came from a run of its own
        optimizer._bookkeeping.ledger = edpsgd.Ledger()
        optimizer.ledger.begin_run({})
        optimizer.ledger.open_epoch(0)
        optimizer.ledger.charge(1.0)
    else:
        optimizer.ledger.open_epoch(0)
        optimizer.ledger.charge(1.0)
    with pytest.raises(ValueError, match="different runs"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def test_rank_0_checkpoint_resumes_bit_for_bit_with_a_seed(workers, tmp_path) -> None:
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        return model, private(
            model, torch.optim.Adam(model.parameters(), lr=0.01), seed=42, noise_decay=edpsgd.LinearDecay(0.1)
        )

    def run(model, optimizer, steps) -> None:
        for step in steps:
            if step % 4 == 0:
                optimizer.set_epoch(step // 4)
            torch.manual_seed(100 * step + workers.rank)
            model(torch.randn(3, 5)).square().mean().backward()
            optimizer.step()

    model, optimizer = build()
    run(model, optimizer, range(12))
    half, interrupted = build()
    run(half, interrupted, range(6))
    saved = workers.gather({"model": half.state_dict(), "optimizer": interrupted.state_dict()})[0]
    again, resumed = build()
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    run(again, resumed, range(6, 12))
    assert_same(again, layers_of(model), tolerance=0.0)


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" not in os.environ, reason="needs torchrun")
def test_ddp_is_refused() -> None:
    plain = nn.Linear(3, 2)
    ddp = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="DistributedDataParallel module holds"):
        edpsgd.PrivateOptimizer(optimizer, plain.named_parameters(), clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="as in DistributedDataParallel"):
        edpsgd.PrivateOptimizer(optimizer, ddp.named_parameters(), clip_norm=1.0, noise_multiplier=1.0)
    del ddp


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" not in os.environ, reason="needs torchrun")
@pytest.mark.parametrize("original", [False, True])
def test_fsdp_is_refused(original) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=original, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FSDP|FullyShardedDataParallel"):
        private(module)


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" not in os.environ, reason="needs torchrun")
def test_ddp_made_later_is_refused_at_the_first_step() -> None:
    plain = nn.Linear(3, 2)
    optimizer = private(plain)
    ddp = nn.parallel.DistributedDataParallel(plain)
    ddp(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match="DistributedDataParallel module holds"):
        optimizer.step()


def test_horovods_optimizer_is_refused(hvd) -> None:
    model = Bag()
    inner = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    with pytest.raises(ValueError, match=r"hvd\.DistributedOptimizer sends the raw gradient"):
        private(model, inner)


def test_a_copy_on_a_given_group(workers) -> None:
    """Groups themselves cannot be copied."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        pytest.skip("needs torchrun")
    model = Bag()
    optimizer = private(model, collective=Torch(torch.distributed.new_group()))
    optimizer.step()
    again = copy.deepcopy(optimizer)
    again.step()
    assert [sum(event.steps for event in one.ledger.events) for one in (optimizer, again)] == [1, 2]
