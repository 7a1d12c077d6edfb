"""kill -9 at random moments, then resume: no step that the model took is missing in a durable ledger."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
import torch

import edpsgd
from tests.test_launchers import ROOT, environment

DELTA = 1e-5


def lives(folder, trials, kind) -> list[dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.crashed_run", str(folder), str(trials), kind],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "trials.json").read_text())


@pytest.mark.timeout(300)
def test_a_durable_ledger_survives_25_kills(tmp_path) -> None:
    rows = lives(tmp_path, 25, "durable")
    assert len(rows) == 25
    assert all(later["seen"] > earlier["seen"] for earlier, later in itertools.pairwise(rows))
    assert all(row["paid"] >= row["seen"] for row in rows), rows
    assert all(row["paid"] <= row["seen"] + 25 * edpsgd.ledger.BLOCK for row in rows)  # and not far more

    ledger = edpsgd.Ledger.read(tmp_path / "ledger.jsonl")
    assert len(ledger.runs) == 25
    # Steps after the last checkpoint ran again on the same examples: each life is an event of its own, and costs so.
    bound = ledger.epsilon(DELTA)
    assert len([e for e in ledger.events if e.steps]) >= 25
    assert float(bound) == pytest.approx(
        edpsgd.accounting.gaussian_epsilon([1.0] * len([e for e in ledger.events if e.steps]), DELTA)
    )
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["optimizer"]["edpsgd"]["ledger"]
    in_checkpoint = edpsgd.Ledger()
    in_checkpoint.load_state_dict(checkpoint)
    assert sum(e.steps for e in in_checkpoint.events) <= sum(e.steps for e in ledger.events)


@pytest.mark.timeout(300)
def test_a_ledger_that_is_saved_with_the_checkpoint_misses_steps(tmp_path) -> None:
    """The same check finds out a ledger that is not durable."""
    rows = lives(tmp_path, 5, "checkpoint")
    assert any(row["paid"] < row["seen"] for row in rows), rows
