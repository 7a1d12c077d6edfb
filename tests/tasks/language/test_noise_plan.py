"""Noise that follows a target."""

from __future__ import annotations

from tests.helpers.jobs import metrics
from tests.helpers.language_jobs import FEDAVG, train


def test_the_noise_follows_a_target(tmp_path, capsys) -> None:
    for sampling in ("poisson", "fixed"):
        train(tmp_path / sampling, *FEDAVG, "--clip-norm", "2", "--epsilon", "3", "--sampling", sampling)
        assert 2.9 < metrics(tmp_path / sampling)[-1]["epsilon"] <= 3.0
