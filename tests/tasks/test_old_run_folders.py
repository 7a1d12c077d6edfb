"""Run folders that version 0.1.0 wrote are read, answer, show their card and go on.

tests/data holds one of `tasks.train` and one of `tasks.language_model`, both complete. Their only checkpoint is
from the middle of the training, so that to go on takes steps, with the state of optimizer, sampler and ledger.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from edpsgd import Ledger, cli
from edpsgd.ledger.guarantee import format_epsilon
from tasks import language_model, predict, train
from tasks.language.run_folder import load_model
from tests.helpers.jobs import metrics, weights
from tests.helpers.paths import ROOT

DATA = ROOT / "tests" / "data"
FILES = sorted(file for file in DATA.glob("*run_folder*/**/*") if file.is_file())


@pytest.fixture
def nlu_run(tmp_path) -> Path:
    return shutil.copytree(DATA / "run_folder_0_1_0", tmp_path / "run")


@pytest.fixture
def language_run(tmp_path) -> Path:
    return shutil.copytree(DATA / "language_run_folder_0_1_0", tmp_path / "run")


def steps(folder: Path) -> list[int]:
    """Of the passes over the data that the ledger holds."""
    return [event.steps for event in Ledger.read(folder / "ledger.jsonl").events]


def assert_close_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit on the machine that wrote them; another processor rounds differently."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_it_answers(nlu_run, capsys) -> None:
    predict.main(["--run", str(nlu_run), "--text", "call anna at nine", "--device", "cpu"])
    [answer] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    labels = json.loads((nlu_run / "labels.json").read_text(encoding="utf-8"))
    assert answer["text"] == "call anna at nine"
    assert answer["intent"] in labels["intents"]


@pytest.mark.parametrize("name", ["run_folder_0_1_0", "language_run_folder_0_1_0"])
def test_its_card_is_shown(name, capsys) -> None:
    """With the ε that the run has written into its metrics and into the card beside it."""
    folder = DATA / name
    assert cli.main(["card", str(folder)]) == 0
    shown = capsys.readouterr().out
    epsilon = metrics(folder)[-1]["epsilon"]
    assert f"ε = {format_epsilon(epsilon)} at δ" in shown
    assert json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))["epsilon"] == epsilon


def test_it_goes_on(nlu_run) -> None:
    """From the end of the first epoch: the second one runs again, is paid again, and ends where it ended before."""
    before = weights(nlu_run)
    assert steps(nlu_run) == [4, 4]
    train.main(["--resume", str(nlu_run)])
    assert steps(nlu_run) == [4, 4, 4]
    assert_close_weights(weights(nlu_run), before)
    *_, old = metrics(DATA / "run_folder_0_1_0")
    *_, new = metrics(nlu_run)
    assert new["step"] == old["step"]
    assert new["epsilon"] > old["epsilon"]


def test_a_language_model_is_read_and_goes_on(language_run) -> None:
    before = weights(language_run)
    model, dictionary = load_model(language_run)
    assert len(dictionary) == model.settings()["words"]
    language_model.main(["--resume", str(language_run)])
    assert sum(steps(language_run)) == 4 + 2  # rounds 2 and 3 were paid twice
    assert_close_weights(weights(language_run), before)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(DATA)))
def test_no_file_names_a_module(file) -> None:
    """Nor is there a pickle, which would name classes: tensors are safetensors, and all else is text."""
    content = file.read_bytes()
    assert file.suffix in (".safetensors", ".json", ".jsonl", ".yaml", ".md", ".txt")
    for module in (b"tasks.", b"models.", b"torch."):
        assert module not in content
