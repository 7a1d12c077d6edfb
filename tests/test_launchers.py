"""Runs tests/parallel with real processes, and kills a worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.common import Bag, private
from tests.helpers.paths import ROOT

SCRIPTS = Path(sys.executable).parent


def command(launcher: str, workers: int, *arguments: str) -> list[str]:
    if launcher == "horovodrun":
        return [str(SCRIPTS / "horovodrun"), "-np", str(workers), "--gloo", sys.executable, *arguments]
    return [str(SCRIPTS / "torchrun"), f"--nproc-per-node={workers}", "--no-python", sys.executable, *arguments]


def environment() -> dict[str, str]:
    """One thread a worker, and the environment's own programs first."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "workers"), [("horovodrun", 2), ("horovodrun", 3), ("torchrun", 3)])
def test_parallel(launcher, workers) -> None:
    arguments = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=120", "tests/parallel"]
    done = subprocess.run(
        command(launcher, workers, *arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    passed = re.findall(r"\d+ passed", done.stdout)  # warnings may say "passed" too
    assert len(passed) == workers, done.stdout[-6000:]


@pytest.mark.parametrize("launcher", ["horovodrun", "torchrun"])
def test_a_killed_worker(launcher, tmp_path) -> None:
    """The others end with an error within a minute, and what is on disk can be used."""
    started = time.monotonic()
    done = subprocess.run(
        command(launcher, 2, "-m", "tests.helpers.killed_worker", str(tmp_path)),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0
    assert time.monotonic() - started < 60 + 20  # a minute, and the start of the processes
    assert (tmp_path / "worker-0-ended").exists(), done.stdout[-3000:] + done.stderr[-3000:]

    model = Bag()
    optimizer = private(model, torch.optim.Adam(model.parameters()), ledger=tmp_path / "ledger.jsonl")
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert checkpoint["step"] == 5
    assert sum(event.steps for event in optimizer.ledger.events) >= 5
    optimizer.set_epoch(1)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
