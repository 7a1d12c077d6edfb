"""Checkpoints of a training: what they hold, the best epoch, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edpsgd.distributed.collectives import Local
from tasks.nlu.labels import Labels
from tasks.nlu.samplers import make_batches
from tasks.nlu.training_state import State, TrainingCheckpoints
from tests.helpers.examples import small_model
from tests.helpers.jobs import here, tiny
from tests.helpers.training_commands import failure, flags

LABELS = Labels.of_slots(["call", "stop"], ["name"])


@pytest.fixture
def kept(tmp_path) -> tuple[TrainingCheckpoints, torch.nn.Module, torch.optim.Optimizer]:
    """Checkpoints of plain training; the word vectors of the model are frozen."""
    model = small_model("clc", LABELS)
    model.words.weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    batches = make_batches(tiny(tmp_path, private="off"), 40, Local())
    return TrainingCheckpoints(tmp_path, here("local", Local()), model, optimizer, batches), model, optimizer


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "words.weight"}


def spoil(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)


def test_a_checkpoint_is_put_back(kept) -> None:
    """Everything that is trained, the optimizer's moments, and the state; frozen tensors are elsewhere."""
    checkpoints, model, optimizer = kept
    state = State(epoch=1, step=3, seconds=0.5, loss=2.0, utterances=7, best=40.0, not_covered=["labels"])
    checkpoints.save(state)
    before, moments = trained(model), optimizer.state_dict()["state"][0]["exp_avg"].clone()
    spoil(model)
    optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    assert checkpoints.load() == state
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained(model).items())
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments)
    assert bool((model.words.weight == 9.0).all())


def test_without_a_checkpoint_nothing_changes(kept) -> None:
    checkpoints, model, _ = kept
    before = trained(model)
    assert checkpoints.load() is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained(model).items())


def test_the_best_epoch_of_the_last_checkpoint_stays(kept) -> None:
    """A newer best epoch takes its place only with the next checkpoint, which names it."""
    checkpoints, model, _ = kept

    def best_files() -> list[str]:
        return sorted(path.name for path in checkpoints.folder.glob("best-*"))

    first = trained(model)
    checkpoints.save_best(0)
    checkpoints.save(State(best_epoch=0))
    spoil(model)
    checkpoints.save_best(1)
    assert best_files() == ["best-000000.safetensors", "best-000001.safetensors"]
    checkpoints.restore_best(0)
    assert all(torch.equal(tensor, first[name]) for name, tensor in trained(model).items())
    checkpoints.save(State(step=1, best_epoch=1))
    assert best_files() == ["best-000001.safetensors"]


def test_weights_that_are_no_numbers_are_not_written(kept) -> None:
    checkpoints, model, _ = kept
    checkpoints.check_weights(step=4)
    with torch.no_grad():
        model.intent.bias[0] = torch.nan
    with pytest.raises(ValueError, match="after step 5 the model holds NaN or infinities"):
        checkpoints.save(State(step=5))
    assert not Path(checkpoints.folder).exists()


# -------------------------------------------------------------------- in whole jobs


def test_a_checkpoint_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    assert str(tmp_path / "run" / "checkpoints") in failure(flags(tmp_path / "run"))


def test_weights_that_are_no_numbers_end_plain_training(tmp_path) -> None:
    said = failure(flags(tmp_path / "run", private="off", learning_rate=1e30, epochs=3, checkpoint_every=3))
    assert "after step 3 the model holds NaN or infinities" in said
    assert "smaller learning_rate" in said
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
