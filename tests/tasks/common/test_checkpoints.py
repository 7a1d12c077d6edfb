"""Checkpoints come back exactly, are whole or not there at all, and never cost the one before."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

import edpsgd
from tasks.common import checkpoints
from tests.helpers.common import Bag, private, set_gradients

SMALL = {"a.weight": torch.arange(3.0)}


def same(found, expected) -> bool:
    """Types, keys and every bit, all the way down."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def saved(folder: Path, optimizer: object, step: int = 1, model: dict = SMALL) -> tuple:
    checkpoints.save(folder, step, model, optimizer, {"epoch": 3})
    return checkpoints.load(folder)


def trained(optimizer: torch.optim.Optimizer, model: Bag) -> torch.optim.Optimizer:
    for _ in range(2):
        set_gradients(model, 0.3)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "state",
    [
        {0: {"betas": (0.9, 0.999), "none": None, "yes": True}, "list": [1, 2.5, "text", (), [], {}], -1: math.inf},
        {"nested": ({1: torch.ones(2)}, [torch.tensor(3)]), "tuple": "a key that is also a mark", "items": [1]},
        [torch.zeros(0, 3), torch.tensor([1, 2], dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16)],
        {"precise": [0.1, 1e-300, 2**62, -0.0], "float64": torch.tensor([0.1], dtype=torch.float64)},
    ],
)
def test_any_nested_state_comes_back(tmp_path, state) -> None:
    weights, found, job = saved(tmp_path, state)
    assert same(found, state)
    assert same(weights, SMALL)
    assert job == {"epoch": 3}


def test_an_adamw_state_comes_back_and_goes_on(tmp_path) -> None:
    model, other = Bag((4, 3)), Bag((4, 3))
    groups = [{"params": [model.p0]}, {"params": [model.p1], "lr": 0.5}]
    optimizer = trained(torch.optim.AdamW(groups, fused=True), model)
    weights, found, _ = saved(tmp_path, optimizer.state_dict(), model=model.state_dict())
    assert same(found, optimizer.state_dict())
    assert set(found["state"]) == {0, 1}  # numbers, not texts

    other.load_state_dict(weights)
    again = torch.optim.AdamW([{"params": [other.p0]}, {"params": [other.p1]}], fused=True)
    again.load_state_dict(found)
    trained(optimizer, model)
    trained(again, other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_a_private_state_comes_back(tmp_path) -> None:
    """With ledger, sampler, seed and measured scales."""
    model = Bag((4, 3))
    batches = edpsgd.ShuffledBatches(8, 2, collective="local", seed=3)
    settings = {"batches": batches, "seed": 3, "layer_scaling": edpsgd.FirstStepNorms(2.0), "collective": "local"}
    optimizer = private(model, torch.optim.AdamW(model.parameters()), **settings)
    optimizer.set_epoch(0)
    for _ in zip(range(3), batches, strict=False):
        set_gradients(model, 0.3)
        optimizer.step()
    state = optimizer.state_dict()
    _, found, _ = saved(tmp_path, state)
    assert same(found, state)
    assert found["edpsgd"]["scales"].keys() == {"p0", "p1"}
    assert found["edpsgd"]["seed"] == 3
    assert [event["steps"] for event in found["edpsgd"]["ledger"]["events"]] == [2, 1]


def test_tensors_that_share_memory_or_are_views(tmp_path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    weights, found, _ = saved(tmp_path, [whole.t(), whole[1], whole], model={"a": whole, "b": whole.t()})
    assert same(found, [whole.t(), whole[1], whole])
    assert same(weights, {"a": whole, "b": whole.t()})


def test_a_state_that_cannot_be_saved_is_refused(tmp_path) -> None:
    saved(tmp_path, {"number": 1})
    with pytest.raises(ValueError, match="tensor:"):
        checkpoints.save(tmp_path, 2, SMALL, {"text": "tensor:0"}, {})
    with pytest.raises(TypeError):
        checkpoints.save(tmp_path, 2, SMALL, {"object": object()}, {})
    assert checkpoints.load(tmp_path)[1] == {"number": 1}


def test_only_the_last_is_kept(tmp_path) -> None:
    for step in (9, 10, 100):
        checkpoints.save(tmp_path, step, SMALL, {"step": step}, {})
    assert [file.name for file in tmp_path.iterdir()] == ["step-000000100"]
    assert checkpoints.load(tmp_path)[1] == {"step": 100}


def test_several_of_one_step(tmp_path) -> None:
    for number in range(12):
        checkpoints.save(tmp_path, 7, SMALL, {"number": number}, {})
        assert len(list(tmp_path.iterdir())) == 1
        assert checkpoints.load(tmp_path)[1] == {"number": number}


@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "the next step"])
@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        *((checkpoints, "save_file", call) for call in (1, 2)),
        *((os, "replace", call) for call in (1, 2, 3)),
        *((os, "fsync", call) for call in (1, 2, 3, 4)),
        (json, "dumps", 1),
    ],
)
def test_a_failure_in_the_middle_leaves_the_one_before(tmp_path, monkeypatch, module, name, call, step) -> None:
    """Whichever call it is that fails."""
    before = saved(tmp_path, {0: torch.ones(2)})
    fail_at(call, module, name, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(tmp_path, step, SMALL, {0: torch.zeros(2)}, {"epoch": 4})
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["step-000000001"]
    assert same(checkpoints.load(tmp_path), before)
    assert saved(tmp_path, {0: torch.full((2,), 5.0)}, step=3)[1][0].tolist() == [5.0, 5.0]


def test_a_failure_after_the_new_one_is_in_place(tmp_path, monkeypatch) -> None:
    saved(tmp_path, {"number": 1})
    fail_at(5, os, "fsync", monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(tmp_path, 1, SMALL, {"number": 2}, {})
    monkeypatch.undo()
    assert checkpoints.load(tmp_path)[1] == {"number": 2}
    assert saved(tmp_path, {"number": 3})[1] == {"number": 3}
    assert len(list(tmp_path.iterdir())) == 1


def fail_at(call: int, module, name: str, monkeypatch) -> None:
    """The function fails when it is called for that time."""
    real, calls = getattr(module, name), itertools.count(1)

    def replaced(*arguments, **settings):
        if next(calls) == call:
            raise OSError(28, "No space left on device")
        return real(*arguments, **settings)

    monkeypatch.setattr(module, name, replaced)


def test_a_full_disk(tmp_path) -> None:
    """The library that writes tensors has errors of its own: they arrive as what they are."""
    saved(tmp_path, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="weights.safetensors"):
            checkpoints.save(tmp_path, 2, {"a": torch.zeros(100_000)}, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [file.name for file in tmp_path.iterdir()] == ["step-000000001"]
    checkpoints.load(tmp_path)


def test_leftovers_of_a_kill(tmp_path) -> None:
    """A process that was killed while writing leaves a folder that nobody takes for a checkpoint."""
    saved(tmp_path, {"number": 1})
    (tmp_path / ".new").mkdir()
    (tmp_path / ".new" / "weights.safetensors").write_bytes(b"half")
    assert checkpoints.load(tmp_path)[1] == {"number": 1}
    assert saved(tmp_path, {"number": 2}, step=2)[1] == {"number": 2}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"optimizer": {}, "state": 1}', "half"])
def test_damaged_files(tmp_path, file, content) -> None:
    folder = checkpoints.save(tmp_path, 1, SMALL, {0: torch.ones(500)}, {})
    if content is None:
        (folder / file).unlink()
    else:
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(ValueError, match=f"{folder}.* is damaged"):
        checkpoints.load(tmp_path)


def test_no_checkpoint(tmp_path) -> None:
    assert checkpoints.latest(tmp_path / "checkpoints") is None
    with pytest.raises(ValueError, match=str(tmp_path)):
        checkpoints.load(tmp_path / "checkpoints")
