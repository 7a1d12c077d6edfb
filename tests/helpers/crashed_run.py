"""A two-worker training that is killed at random moments and resumed, again and again; run by test_crashes.py.

The parent forks the workers, so that starting them again takes no time. Worker 0 appends a line to a log after every
inner step: what an observer of the model has seen. Only the ledger says what was paid for.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import edpsgd
from tests.helpers.common import Bag, private, quiet, set_gradients

EXAMPLES, BATCH, SAVE_EVERY = 400, 2, 7


def train(folder: Path, rank: int, trial: int, durable: bool) -> None:
    """Until killed."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / f'rendezvous-{trial}'}", rank=rank, world_size=2
    )
    model = Bag((40, 20))
    batches = edpsgd.ShuffledBatches(EXAMPLES, BATCH, collective="torch")
    ledger = folder / "ledger.jsonl" if durable else None
    optimizer = private(model, collective="torch", batches=batches, ledger=ledger)
    if (folder / "checkpoint.pt").exists():
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    log = os.open(folder / "steps.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for epoch in range(optimizer.epoch or 0, 10**9):
        optimizer.set_epoch(epoch)
        for number, batch in enumerate(batches):
            if batch:
                set_gradients(model, 1.0)
            optimizer.step()
            if rank == 0:
                os.write(log, b"step\n")
                if number % SAVE_EVERY == 0:
                    save(folder, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def save(folder: Path, checkpoint: dict) -> None:
    torch.save(checkpoint, folder / "checkpoint.tmp")
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")


def run_and_kill(folder: Path, trial: int, durable: bool, seconds: float) -> None:
    """One life of the two workers: some time after their first step, both get SIGKILL."""
    before, workers = seen(folder), []
    for rank in range(2):
        process = os.fork()
        if process == 0:
            try:
                with quiet():
                    train(folder, rank, trial, durable)
            finally:
                os._exit(1)
        workers.append(process)
    deadline = time.monotonic() + 60
    while seen(folder) == before and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(seconds)
    for process in workers:
        os.kill(process, signal.SIGKILL)
    ends = [os.waitpid(process, 0)[1] for process in workers]
    if any(end != signal.SIGKILL for end in ends):
        raise RuntimeError(f"trial {trial}: a worker ended before it was killed: {ends}")


def seen(folder: Path) -> int:
    """Steps that the model took, over all lives."""
    log = folder / "steps.log"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def paid(folder: Path, durable: bool) -> int:
    """Steps that the ledger knows of: of the file, or of the checkpoint."""
    if durable:
        ledger = edpsgd.Ledger.read(folder / "ledger.jsonl")
    else:
        ledger = edpsgd.Ledger()
        if (folder / "checkpoint.pt").exists():
            state = torch.load(folder / "checkpoint.pt", weights_only=True)["optimizer"]["edpsgd"]["ledger"]
            ledger.load_state_dict(state)
    return sum(event.steps for event in ledger.events)


def main(folder: Path, trials: int, durable: bool) -> None:
    torch.set_num_threads(1)
    private(Bag(), collective="local").step()  # imports what torch imports late, once for all lives
    rng, rows = random.Random(7), []
    for trial in range(trials):
        run_and_kill(folder, trial, durable, rng.uniform(0.0, 0.25))
        rows.append({"seen": seen(folder), "paid": paid(folder, durable)})
    (folder / "trials.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "durable")
