"""What gradients are rounded to when they are sent."""

from __future__ import annotations

import pytest
import torch

from edpsgd.distributed.collectives import Local
from edpsgd.distributed.compression import check_compression, transfer_dtype
from edpsgd.distributed.horovod import Horovod


def test_dtypes() -> None:
    found = [transfer_dtype(name) for name in (None, "fp16", "bf16")]
    assert found == [None, torch.float16, torch.bfloat16]


def test_horovod_cannot_add_bfloat16() -> None:
    horovod = Horovod.__new__(Horovod)  # without hvd.init()
    with pytest.raises(ValueError, match="bf16.*needs torch.distributed"):
        check_compression(horovod, "bf16")
    check_compression(horovod, "fp16")
    check_compression(Local(), "bf16")
