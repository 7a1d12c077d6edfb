"""A command that is killed and started again ends with the same tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import results
from tests.helpers.paths import ROOT
from tests.test_launchers import environment


def start(folder: Path) -> subprocess.Popen:
    """One training after the other, so that it is known which is killed."""
    flags = ["--reduced", "--only", "8.0", "--jobs", "1", "--out", str(folder), "--runs", str(folder / "runs")]
    command = [sys.executable, "-m", "benchmarks.recipes", *flags]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)


def wait_for(path: Path, job: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert job.poll() is None, "it ended before"
        assert time.monotonic() < end
        time.sleep(0.02)


def figures(folder: Path) -> list[dict]:
    """All but how long it took."""
    rows = results.load("recipes", folder)["rows"]
    return [{name: value for name, value in row.items() if name != "minutes"} for row in rows]


def page(folder: Path) -> list[str]:
    """All but the line that says how long it took."""
    lines = (folder / "recipes.md").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("From recipes.json")]
    assert len(kept) == len(lines) - 1
    return kept


def test_the_tables_are_the_same(tmp_path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(whole).wait(200) == 0
    killed = start(parts)
    wait_for(parts / "runs" / "clc-generated-8.0" / "config.yaml", killed)  # it is about to train
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (parts / "recipes.json").exists()
    assert start(parts).wait(200) == 0
    assert figures(parts) == figures(whole)
    assert 7.9 < figures(parts)[0]["spent"] <= 8
    assert page(parts) == page(whole)
