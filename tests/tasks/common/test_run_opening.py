"""Where a new run goes, and folders that are refused."""

from __future__ import annotations

import re

import torch

from tests.helpers.jobs import run, tiny, weights
from tests.helpers.training_commands import failure, flags


def test_a_folder_that_nobody_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run(tiny(tmp_path, output=None, epochs=1, private="off")).folder
    assert re.fullmatch(r"runs/generated-clc-off-\d{8}-\d{6}", str(folder))
    assert (tmp_path / folder / "weights.safetensors").exists()


def test_a_folder_that_holds_a_run(tmp_path) -> None:
    run(tiny(tmp_path / "run", epochs=1))
    before = weights(tmp_path / "run")
    assert f"--resume {tmp_path / 'run'}" in failure(flags(tmp_path / "run"))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(tmp_path / "run").items())
    (tmp_path / "run" / "config.yaml").unlink()
    assert "without a config.yaml" in failure(flags(tmp_path / "run"))


def test_a_folder_that_cannot_be_made(tmp_path) -> None:
    (tmp_path / "file").touch()
    said = failure(flags(tmp_path / "file" / "run"))
    assert said.startswith("error: ")
    assert str(tmp_path / "file") in said
