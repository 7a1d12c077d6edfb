"""The edpsgd command: its help, and what starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edpsgd import cli
from tests.helpers.edpsgd_command import EPSILON, TRAINING, refused


def test_missing_flags_and_commands(capsys) -> None:
    assert "--epsilon" in refused(capsys, "plan", *TRAINING, "--epochs", "1")
    assert "plan|epsilon|card" in refused(capsys)
    assert "'train'" in refused(capsys, "train")


def test_help(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--help"])
    assert stopped.value.code == 0
    assert "--micro-batches" in capsys.readouterr().out


def test_as_a_module_with_a_full_disk() -> None:
    command = [sys.executable, "-m", "edpsgd.cli", *EPSILON]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "exact Gaussian" in done.stdout
    with open("/dev/full", "w") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert failed.returncode == 2
    assert failed.stderr == "edpsgd: error: the output cannot be written: No space left on device\n"
