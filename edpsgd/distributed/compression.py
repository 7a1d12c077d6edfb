"""Gradients that are rounded to half precision before they are summed over the workers."""

from __future__ import annotations

import torch

from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.horovod import Horovod

_TRANSFER_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def transfer_dtype(compression: str | None) -> torch.dtype | None:
    """The precision in which gradients are sent; None to send them as they are."""
    return None if compression is None else _TRANSFER_DTYPES[compression]


def check_compression(collective: Collective, compression: str | None) -> None:
    """Refuses a precision that the library of these workers cannot add up."""
    if compression == "bf16" and isinstance(collective, Horovod):
        raise ValueError("compression='bf16' needs torch.distributed: Horovod cannot add bfloat16, use 'fp16'")
