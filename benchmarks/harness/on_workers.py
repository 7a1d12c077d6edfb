"""Runs a measurement on Horovod workers with one thread each, in processes of its own, and hands its result back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.results import Found

Job = Mapping[str, Any]  # arguments of what is measured


def run(module: str, job: Job, workers: int) -> Found:
    """What worker 0 found; ``module`` must call ``serve`` when it is given --job."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, "--job", json.dumps(job), "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        launcher = ["horovodrun", "-np", str(workers), "--gloo", *command]
        done = subprocess.run(launcher, env=environment, check=False, capture_output=True, text=True)
        result = Path(folder) / "result.json"
        if done.returncode or not result.exists():
            raise RuntimeError(f"{module} {json.dumps(job)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return dict(json.loads(result.read_text(encoding="utf-8")))


def serve(measure: Callable[..., Mapping[str, Any]], job: Job, folder: Path) -> None:
    """The part of one worker: ``measure`` gets the job's entries and the folder; worker 0 writes what it returns."""
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    result = measure(**job, folder=folder)
    if hvd.rank() == 0:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
