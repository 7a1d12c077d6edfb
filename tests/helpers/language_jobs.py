"""Language-model jobs that take a second."""

from __future__ import annotations

from pathlib import Path

from tasks import language_model

SMALL = ["--users", "60", "--sentences", "6", "--words", "40", "--hidden", "8", "--dimension", "6", "--no-tensorboard"]
FEDAVG = [*SMALL, "--cohort", "10", "--rounds", "6", "--checkpoint-every", "3", "--learning-rate", "1", "--seed", "3"]
PRIVATE = [*FEDAVG, "--clip-norm", "2", "--noise-multiplier", "1"]


def train(folder: Path, *flags: str) -> None:
    language_model.main([*flags, "--output", str(folder)])
