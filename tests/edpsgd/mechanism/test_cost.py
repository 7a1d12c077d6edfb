"""What the wrapper costs: no wait for the device in the hot path, and at most one more gradient of memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edpsgd import tensors
from tests.helpers.common import Bag, Spy, private, quiet, set_gradients

WAITS = (
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "equal",
    "index",
    "index_put_",
)  # these can wait for the device


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are made as on a GPU; those of tensors that the host has at hand may be read."""
    monkeypatch.setattr(tensors, "_is_at_hand", lambda tensor: False)


class Operations(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> list[str]:
        return [name for name in self.names if name in WAITS]


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("how", ["flat", "per_layer"])
@pytest.mark.parametrize("scales", [None, {"p0": 1.0, "p1": 2.0, "p2": 3.0}])
@pytest.mark.parametrize("bad", [False, True])
def test_no_host_synchronisation(how, scales, bad) -> None:
    model = Bag()
    optimizer = private(model, clipping=how, layer_scaling=scales)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # lets it make its tensors
    set_gradients(model, float("nan") if bad else 1.0)
    with Operations() as seen:
        optimizer.accumulate(scaler=scaler)
    assert "_foreach_norm" in seen.names
    assert seen.waits == []
    set_gradients(model, 1.0)
    with Operations() as seen, quiet():
        optimizer.step()  # SGD itself reads nothing, so this covers clip, noise, and all else
    assert "addcmul_" in seen.names
    assert seen.waits == []


@pytest.mark.usefixtures("as_on_a_device")
def test_nothing_is_read_by_the_host_before_the_sum(monkeypatch) -> None:
    """tolist() and its like are no operations of torch, so they are forbidden by hand."""
    read: list[str] = []
    model, spy = Bag(), Spy()
    optimizer = private(model, collective=spy)
    real = torch.Tensor.tolist

    def forbid(name: str) -> None:
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, **k: read.append(f"{name}, {spy.messages} sent"))

    for name in ("item", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        forbid(name)
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda self: (read.append(f"tolist, {spy.messages} sent"), real(self))[1]
    )
    for _ in range(2):
        set_gradients(model, 1.0)
        optimizer.accumulate()
    optimizer.step()
    assert read == ["tolist, 1 sent"]


@pytest.mark.usefixtures("as_on_a_device")
def test_the_profiler_agrees() -> None:
    model = Bag()
    optimizer = private(model)
    set_gradients(model, 1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.key for event in profile.key_averages()]
    assert "aten::_foreach_norm" in names
    assert "aten::_local_scalar_dense" not in names


PEAK = """
import json, os, resource, sys, torch
from tests.helpers.common import private


def train(kind, accumulate, rows=12_500_000):  # 200 MB
    weight = torch.nn.Parameter(torch.zeros(rows, 4))
    model = torch.nn.ParameterDict({"weight": weight, "bias": torch.nn.Parameter(torch.zeros(3))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind != "plain":
        optimizer = private(model, optimizer, noise_placement=kind)
    for _ in range(2):
        for _ in range(accumulate):
            optimizer.zero_grad()
            for p in model.values():
                p.grad = torch.ones_like(p)
            if kind != "plain":
                optimizer.accumulate()
        optimizer.step()


torch.set_num_threads(1)
for kind, accumulate in json.loads(sys.argv[1]):
    process = os.fork()
    if process == 0:
        for other in ("plain", "sharded", "per_worker"):
            train(other, 1, rows=4)  # the code of all kinds is in memory, whichever is measured
        train(kind, accumulate)
        os.write(1, f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\\n".encode())
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def peak_megabytes(pytestconfig) -> dict[tuple[str, int], float]:
    """Of trainings, each in a process of its own, by kind and micro-batches; torch is imported once for all."""
    trainings = [(kind, k) for kind in ("plain", "sharded", "per_worker") for k in (1, 2)]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps(trainings)],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=True,
    )
    peaks = [int(line) / 1024 for line in done.stdout.splitlines()]
    return dict(zip(trainings, peaks, strict=True))


@pytest.mark.parametrize("placement", ["sharded", "per_worker"])
@pytest.mark.parametrize("k", [1, 2])
def test_at_most_one_more_gradient(peak_megabytes, placement, k) -> None:
    extra = peak_megabytes[placement, k] - peak_megabytes["plain", k]
    assert extra < 1.1 * 12_500_000 * 4 * 4 / 2**20
