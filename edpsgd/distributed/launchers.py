"""Which collective a script runs under: the launcher decides, or whoever was initialised."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch.distributed as dist

from edpsgd.distributed.collectives import Collective, Local, Torch
from edpsgd.distributed.horovod import Horovod

_BY_NAME: dict[str, Callable[[], Collective]] = {"local": Local, "horovod": Horovod, "torch": Torch}


def resolve(collective: str | Collective) -> Collective:
    """The workers of a name, which "auto" finds out, or the given object if it has the protocol."""
    if isinstance(collective, str):
        name = _detect() if collective == "auto" else collective
        if name not in _BY_NAME:
            raise ValueError(f"collective must be 'auto', 'horovod', 'torch', 'local' or an object, got {name!r}")
        return _BY_NAME[name]()
    if not isinstance(collective, Collective):
        raise ValueError(
            f"collective must have rank, size, sum_ and gather (edpsgd.distributed.Collective), got {collective!r}"
        )
    return collective


def _detect() -> str:
    """The name of the workers: of the launcher, or without one of the library that was initialised."""
    if "HOROVOD_RANK" in os.environ or "HOROVOD_HOSTNAME" in os.environ:
        return "horovod"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torch"
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        return "horovod"
    if dist.is_available() and dist.is_initialized():
        return "torch"
    # Processes that do not know of each other would each train a model of its own, and nobody would notice.
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"):
        if int(os.environ.get(variable) or 1) > 1:
            raise ValueError(
                f"{variable}={os.environ[variable]} says that there are several workers, but neither Horovod nor "
                "torch.distributed is initialised: call hvd.init() or torch.distributed.init_process_group(), "
                "or say collective='local' if each process trains a model of its own"
            )
    return "local"
