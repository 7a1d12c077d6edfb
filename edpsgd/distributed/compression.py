"""Gradients that are rounded before they are summed over the workers."""

from __future__ import annotations

import torch

from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.horovod import Horovod

_WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def wire_dtype(compression: str | None) -> torch.dtype | None:
    """What gradients are rounded to on the wire, None to send them as they are."""
    return None if compression is None else _WIRE_DTYPES[compression]


def check_compression(collective: Collective, compression: str | None) -> None:
    """Refuses what the library cannot send."""
    if compression == "bf16" and isinstance(collective, Horovod):
        raise ValueError("compression='bf16' needs torch.distributed: Horovod cannot add bfloat16, use 'fp16'")
