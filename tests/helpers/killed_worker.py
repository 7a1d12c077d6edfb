"""A training job whose last worker dies at step 5; run by test_launchers.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from edpsgd.distributed.launchers import resolve
from tests.helpers.common import Bag, private, set_gradients


def main(folder: Path) -> None:
    if "HOROVOD_RANK" in os.environ:
        import horovod.torch as hvd

        hvd.init()
    else:
        torch.distributed.init_process_group("gloo")
    workers, model = resolve("auto"), Bag()
    optimizer = private(model, torch.optim.Adam(model.parameters()), ledger=folder / "ledger.jsonl")
    optimizer.set_epoch(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the launcher may be quicker than the network
    try:
        for step in range(1000):
            if step == 5 and workers.rank == workers.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            set_gradients(model, 1.0)
            optimizer.step()
            if workers.rank == 0:
                save(folder, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    except BaseException:
        (folder / f"worker-{workers.rank}-ended").touch()
        raise


def save(folder: Path, checkpoint: dict) -> None:
    torch.save(checkpoint, folder / "checkpoint.tmp")
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
