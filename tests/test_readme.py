"""What the README says: its figures come from the results, its script runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step_time import readme_table
from tests.test_launchers import command, environment

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def step_time() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "step_time.json").read_text())


def test_the_table_is_that_of_the_results(step_time) -> None:
    assert readme_table(step_time) in README


def test_the_figure_to_reach(step_time) -> None:
    """eDP-SGD over Horovod's SGD: at most 1.10 on both models and lengths."""
    assert {(row["model"], row["tokens"]) for row in step_time["rows"]} == {
        ("bert", 14), ("bert", 30), ("bilstm_crf", 14), ("bilstm_crf", 30)
    }  # fmt: skip
    for row in step_time["rows"]:
        assert row["contenders"]["edp_sharded"]["ratio_to_sgd"][1] <= 1.10


@pytest.mark.parametrize("launcher", ["horovodrun", "python"])
def test_the_script_runs(tmp_path, launcher) -> None:
    script = re.search(r"```python\n(import horovod.*?)```", README, re.DOTALL)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1] + "print(optimizer.ledger.events[-1].steps, 'steps')\n")
    started = command("horovodrun", 2, "train.py") if launcher == "horovodrun" else [sys.executable, "train.py"]
    done = subprocess.run(started, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.count("10 steps") == (2 if launcher == "horovodrun" else 1), done.stdout + done.stderr
