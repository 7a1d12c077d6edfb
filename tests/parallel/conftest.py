"""These tests run in one process, and once more under each launcher (tests/test_launchers.py)."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.launchers import resolve
from tests.helpers.waiting import sleep_while_horovod_works


@pytest.fixture(scope="session", autouse=True)
def workers() -> Collective:
    torch.set_num_threads(1)
    if "HOROVOD_RANK" in os.environ:
        import horovod.torch as hvd

        hvd.init()
        sleep_while_horovod_works()
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")
        # Every PrivateOptimizer looks for a DistributedDataParallel among all objects that are not
        # frozen. None of those that pytest and the imports have made is one.
        gc.collect()
        gc.freeze()
    return resolve("auto")


@pytest.fixture
def hvd(workers):
    if "HOROVOD_RANK" not in os.environ:
        pytest.skip("needs horovodrun")
    import horovod.torch

    return horovod.torch
