"""Where a job runs: one process, the workers of horovodrun or those of torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.launchers import resolve

T = TypeVar("T")


@dataclass(frozen=True)
class Workers:
    """The workers of a job, as one of them sees them.

    Attributes:
        launcher: "horovod", "torch" or "local".
        collective: how they talk.
        device: where this one computes; with GPUs, the one of its local rank.
    """

    launcher: str
    collective: Collective
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0, which writes and talks."""
        return self.collective.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """What every worker does by itself; if one of them fails, all do, and none waits for it."""
        found: list[T] = []
        consensus.together(self.collective, lambda: found.append(work()))
        return found[0]

    def on_first(self, work: Callable[[], T]) -> T | None:
        """What worker 0 does alone, and None on the others; if it fails, all do."""
        return self.together(lambda: work() if self.is_first else None)

    def broadcast(self, model: nn.Module) -> None:
        """Gives every worker the model of worker 0."""
        if self.launcher == "horovod":
            _horovod().broadcast_parameters(model.state_dict(), root_rank=0)
        elif self.launcher == "torch":
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)

    def averaged(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of plain training: it steps on the mean gradient of all workers."""
        if self.launcher == "horovod":
            named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            return _horovod().DistributedOptimizer(optimizer, named_parameters=named)
        if self.launcher == "torch":
            optimizer.register_step_pre_hook(_average)
        return optimizer


@contextmanager
def workers(device: str = "auto", threads: int | None = None) -> Iterator[Workers]:
    """Starts whatever the launcher needs, and ends it; what runs already is left running.

    Args:
        device: auto, cpu or cuda.
        threads: of this worker; if not given, OMP_NUM_THREADS, or this worker's share of the cores.
    """
    launcher = _launcher()
    starts_group = launcher == "torch" and not dist.is_initialized()
    if launcher == "horovod":
        _horovod().init()
    elif starts_group:
        uses_gpu = device != "cpu" and torch.cuda.is_available()
        dist.init_process_group("nccl" if uses_gpu else "gloo")
    local_rank, local_size = _on_this_node(launcher)
    if threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or max(1, _cores() // local_size))
    try:
        yield Workers(launcher, resolve(launcher), choose_device(device, local_rank))
    finally:
        if starts_group:
            dist.destroy_process_group()


def _launcher() -> str:
    """Who started this process: "torch", "horovod", or "local" if it is the only one.

    Several processes that mpirun started are Horovod's, even if Horovod does not know of them yet:
    each training by itself, they would share a run folder and a ledger.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torch"
    by_horovodrun = "HOROVOD_RANK" in os.environ or "HOROVOD_HOSTNAME" in os.environ
    if by_horovodrun or _started() > 1:
        return "horovod"
    return "local"


def _started() -> int:
    """How many processes mpirun, or whoever sets these variables, has started."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
    return max(int(os.environ.get(name) or 1) for name in names)


def _on_this_node(launcher: str) -> tuple[int, int]:
    """This worker's number among those of its node, and how many they are."""
    if launcher == "horovod":
        size, known = _started(), _horovod().size()
        if known < size:
            raise ValueError(f"{size} processes were started, and Horovod knows of {known}: use horovodrun")
        return int(_horovod().local_rank()), int(_horovod().local_size())
    return int(os.environ.get("LOCAL_RANK") or 0), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _cores() -> int:
    """How many cores this process may use, where the system tells that."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a worker: the GPU of its local rank if there is one, or the CPU.

    Args:
        name: auto, cpu or cuda.
        local_rank: of the worker on its machine.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, and torch finds no GPU")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    number = local_rank % torch.cuda.device_count()  # a launcher may show each worker its own GPU only
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _horovod() -> Any:
    import horovod.torch as hvd

    return hvd


def _average(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Averages the gradients before a plain step under torchrun; a worker without data has zeros."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    # One tensor for all gradients, since each message costs time of its own.
    flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [p.numel() for p in parameters]
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)


def has_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16.

    A processor without them runs no LSTM in bf16, and everything else very slowly.
    """
    if device.type != "cpu":
        return True
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
