"""The training loop: going on after interruptions, early stopping, the budget, and losses that go wrong.

Interrupted by an exception, in one process. Real kills are in tests/tasks/test_resume.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

import edpsgd
from edpsgd.accounting import gaussian_epsilon
from models.heads import IntentSlotModel
from tasks.common import checkpoints
from tasks.nlu import run_folder, training_loop
from tasks.nlu.configuration import Config, parse
from tasks.nlu.generator import utterances
from tasks.nlu.new_model import not_covered
from tasks.nlu.training_job import Outcome
from tests.helpers import jobs
from tests.helpers.common import quiet
from tests.helpers.jobs import assert_same_weights, metrics, run, tiny, tiny_encoder, weights
from tests.helpers.training_commands import failure, flags


class Interrupted(Exception):
    """Somebody pulled the plug."""


def interrupt(config: Config, step: int, monkeypatch, resume: Path | None = None) -> None:
    """Begins or goes on with a job, which ends before it takes that step, counted from 0."""
    take = training_loop.Training._step

    def stops(self, *arguments) -> None:
        if self.state.step == step:
            raise Interrupted
        take(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training_loop.Training, "_step", stops)
        with pytest.raises(Interrupted):
            run(config, resume=resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[..., Path]:
    """A run with these settings that nobody interrupted; each is made once."""
    made: dict[str, Path] = {}

    def find(**settings) -> Path:
        if repr(settings) not in made:
            made[repr(settings)] = run(tiny(tmp_path_factory.mktemp("whole"), **settings)).folder
        return made[repr(settings)]

    return find


def go_on(folder: Path) -> Outcome:
    config, _ = parse(["--resume", str(folder)])
    return run(config, resume=folder)


def ledger(folder: Path) -> edpsgd.Ledger:
    return edpsgd.Ledger.read(folder / "ledger.jsonl")


def steps(folder: Path) -> list[int]:
    """Of the passes over the data."""
    return [event.steps for event in ledger(folder).events if event.kind == "gradients" and event.steps]


def comparable(folder: Path) -> list[dict]:
    """The metrics but for the time, for ε, which counts repeated steps, and for what begins anew with the process."""
    return [
        {name: value for name, value in line.items() if name not in ("seconds", "epsilon", "clip_fraction")}
        for line in metrics(folder)
    ]


def added(folder: Path) -> list[str]:
    """What the job says in the card beside what every such model says from the beginning, which must be there too."""
    stated = edpsgd.card.stated(json.loads((folder / "privacy_card.json").read_text(encoding="utf-8")))
    always = not_covered(parse(["--resume", str(folder)])[0], run_folder.load(folder).labels)
    assert "the label set: intents and slot types were read from the training set" in always
    assert stated[: len(always)] == always
    return stated[len(always) :]


# -------------------------------------------------------------------- complete


@pytest.mark.parametrize("private", ["edp", "off"])
def test_a_complete_run_is_only_tested_again(tmp_path, private) -> None:
    folder = tmp_path / "run"
    before = run(tiny(folder, private=private))
    lines, found = metrics(folder), weights(folder)
    for _ in range(2):
        after = go_on(folder)
        assert (after.metrics, after.seconds) == (before.metrics, before.seconds)
        assert metrics(folder) == lines
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(folder).items())
    if private == "edp":
        assert float(after.epsilon) == float(before.epsilon)
        assert steps(folder) == [5, 5]
        assert added(folder) == []


def test_a_complete_run_without_its_checkpoints(tmp_path) -> None:
    """Its weights are no longer the initial ones: to begin anew would train twice."""
    folder = run(tiny(tmp_path / "run")).folder
    for file in (folder / "checkpoints").rglob("*.*"):
        file.unlink()
    for file in (folder / "checkpoints").iterdir():
        file.rmdir()
    with pytest.raises(ValueError, match="its checkpoints are gone"):
        go_on(folder)


# -------------------------------------------------------------------- interrupted


@pytest.mark.parametrize(("step", "sampling"), [(0, "shuffled"), (3, "shuffled"), (3, "poisson")])
def test_before_the_first_checkpoint(tmp_path, monkeypatch, whole, step, sampling) -> None:
    """From the initial weights, with the same draws; what was charged stays charged."""
    settings = {"seed": 7, "sampling": sampling}
    interrupt(tiny(tmp_path / "run", **settings), step, monkeypatch)
    assert steps(tmp_path / "run") == [step] * (step > 0)
    go_on(tmp_path / "run")
    assert_same_weights(tmp_path / "run", whole(**settings))
    assert comparable(tmp_path / "run") == comparable(whole(**settings))
    assert steps(tmp_path / "run") == [*[step] * (step > 0), 5, 5]
    assert added(tmp_path / "run") == []
    if sampling == "shuffled":
        passes = [1.0] * (3 if step else 2)
        assert metrics(tmp_path / "run")[-1]["epsilon"] == pytest.approx(gaussian_epsilon(passes, 5e-4))


@pytest.mark.parametrize(
    ("step", "passes"),
    [
        (9, [5, 4, 2]),  # step 8 runs again, in an event of its own
        (8, [5, 5]),  # right after a checkpoint there is nothing to repeat
        (5, [5, 5]),  # nor at the beginning of an epoch
    ],
)
@pytest.mark.parametrize("private", ["edp", "off"])
def test_between_checkpoints(tmp_path, monkeypatch, whole, step, passes, private) -> None:
    settings = {"seed": 7, "checkpoint_every": 2, "private": private, "schedule": "linear", "warmup": 0.3}
    interrupt(tiny(tmp_path / "run", **settings), step, monkeypatch)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "step": 10, "se')  # half a line, as a crash leaves it
    go_on(tmp_path / "run")
    assert_same_weights(tmp_path / "run", whole(**settings))
    assert comparable(tmp_path / "run") == comparable(whole(**settings))
    if private == "edp":
        assert steps(tmp_path / "run") == passes
        expected = gaussian_epsilon([1.0] * len(passes), 5e-4)
        assert metrics(tmp_path / "run")[-1]["epsilon"] == pytest.approx(expected)


def test_scales_are_measured_again_only_if_no_checkpoint_has_them(tmp_path, monkeypatch, whole) -> None:
    settings = {"seed": 7, "layer_scaling": "private:3.0"}
    for name, every, measured in (("late", 2, 1), ("early", 0, 2)):
        interrupt(tiny(tmp_path / name, checkpoint_every=every, **settings), 3, monkeypatch)
        go_on(tmp_path / name)
        assert_same_weights(tmp_path / name, whole(**settings))
        assert [event.kind for event in ledger(tmp_path / name).events].count("layer_norms") == measured


def test_a_frozen_encoder_stays_frozen(tmp_path, monkeypatch) -> None:
    encoder = tiny_encoder(tmp_path / "encoder")
    settings = {"model": "bert", "pretrained": encoder, "freeze": "embeddings", "seed": 7, "checkpoint_every": 2}
    run(tiny(tmp_path / "whole", **settings))
    interrupt(tiny(tmp_path / "run", **settings), 3, monkeypatch)
    before = weights(tmp_path / "run")
    go_on(tmp_path / "run")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    moved = {name for name, tensor in weights(tmp_path / "run").items() if not torch.equal(tensor, before[name])}
    assert moved
    assert not any("embeddings" in name for name in moved)


def test_other_data_are_refused(tmp_path, monkeypatch) -> None:
    file = tmp_path / "some.jsonl"
    lines = [
        json.dumps({"tokens": found.words, "tags": found.tags, "intent": found.intent})
        for found in utterances(120, seed=0)
    ]
    file.write_text("\n".join(lines))
    interrupt(tiny(tmp_path / "run", task="jsonl", data=str(file), checkpoint_every=2), 3, monkeypatch)
    file.write_text("\n".join(lines[:110]))
    with pytest.raises(ValueError, match="the data are not those of the run"):
        go_on(tmp_path / "run")
    file.write_text("\n".join(lines))
    go_on(tmp_path / "run")


def test_a_damaged_checkpoint_costs_no_ledger(tmp_path, monkeypatch) -> None:
    interrupt(tiny(tmp_path / "run", checkpoint_every=2), 3, monkeypatch)
    checkpoint = checkpoints.latest(tmp_path / "run" / "checkpoints")
    (checkpoint / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=f"{checkpoint} is damaged"):
        go_on(tmp_path / "run")
    assert steps(tmp_path / "run") == [3]


def test_a_checkpoint_of_another_model_is_refused(tmp_path, monkeypatch) -> None:
    interrupt(tiny(tmp_path / "run", checkpoint_every=2), 3, monkeypatch)
    file = checkpoints.latest(tmp_path / "run" / "checkpoints") / "weights.safetensors"
    held = checkpoints.load_weights(file)
    held.pop("intent.bias")
    checkpoints.save_weights(file, held)
    with quiet(), pytest.raises(ValueError, match="are of another model"):
        go_on(tmp_path / "run")


# -------------------------------------------------------------------- early stopping


def rates(monkeypatch, sers: Iterable[float]) -> list[dict[str, torch.Tensor]]:
    """Validation finds these error rates, one after the other; the weights that it saw are kept in the list."""
    values, seen = iter(sers), []

    def found(model, *_) -> dict[str, float]:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return {"ser": next(values), "intent_accuracy": 0.0, "slot_f1": 0.0, "utterances": 1}

    monkeypatch.setattr(training_loop, "evaluate", found)
    return seen


def has_weights(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, expected[name]) for name, tensor in weights(folder).items())


@pytest.mark.parametrize("private", ["edp", "off"])
def test_early_stopping_keeps_the_best_epoch(tmp_path, monkeypatch, private) -> None:
    seen = rates(monkeypatch, [50.0, 40.0, 40.0, 45.0])
    run(tiny(tmp_path / "run", private=private, epochs=9, early_stopping=2))
    assert len(metrics(tmp_path / "run")) == 4 + 1
    assert has_weights(tmp_path / "run", seen[1])
    assert not has_weights(tmp_path / "run", seen[3])
    for _ in range(2):  # and there is nothing left to do
        if private == "edp":
            assert added(tmp_path / "run") == [
                "the choice of epoch 2: early stopping by the error rate on validation data"
            ]
            assert steps(tmp_path / "run") == [5] * 4
        go_on(tmp_path / "run")
        assert len(metrics(tmp_path / "run")) == 4 + 1
        assert has_weights(tmp_path / "run", seen[1])
    assert len(list((tmp_path / "run" / "checkpoints").glob("best-*"))) == 1


def test_early_stopping_that_has_no_reason_to_stop(tmp_path, monkeypatch) -> None:
    seen = rates(monkeypatch, [50.0, 40.0, 45.0])
    run(tiny(tmp_path / "run", epochs=3, early_stopping=2))
    assert has_weights(tmp_path / "run", seen[1])
    assert len(added(tmp_path / "run")) == 1
    assert "the choice of epoch 2" in added(tmp_path / "run")[0]


def test_the_best_epoch_survives_an_interruption(tmp_path, monkeypatch) -> None:
    seen = rates(monkeypatch, [40.0, 50.0, 45.0])
    interrupt(tiny(tmp_path / "run", epochs=9, early_stopping=2, checkpoint_every=2), 8, monkeypatch)
    go_on(tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 3 + 1
    assert has_weights(tmp_path / "run", seen[0])


def test_a_best_epoch_without_its_checkpoint_does_not_count(tmp_path, monkeypatch) -> None:
    """It runs again, with other noise, and may well not be the best any more."""
    seen = rates(monkeypatch, [40.0, 30.0, 50.0, 50.0])
    save, calls = checkpoints.save, []

    def once(*arguments) -> Path:
        calls.append(None)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return save(*arguments)

    monkeypatch.setattr(checkpoints, "save", once)
    with pytest.raises(OSError, match="No space"):
        run(tiny(tmp_path / "run", epochs=9, early_stopping=2))
    go_on(tmp_path / "run")
    assert [line.get("validation_ser") for line in metrics(tmp_path / "run")] == [40.0, 50.0, 50.0, None]
    assert has_weights(tmp_path / "run", seen[0])


# -------------------------------------------------------------------- the budget


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_steps_that_ran_twice_end_the_training_early(tmp_path, monkeypatch, sampling, capsys) -> None:
    """The budget is that of one training: the last steps cannot be paid any more, and the card says so."""
    settings = {"epsilon": 3.0, "epochs": 3, "checkpoint_every": 2, "sampling": sampling}
    interrupt(tiny(tmp_path / "run", **settings), 9, monkeypatch)
    outcome = go_on(tmp_path / "run")
    taken = metrics(tmp_path / "run")[-1]["step"]
    assert 10 <= taken < 15  # the third epoch is not complete
    assert float(ledger(tmp_path / "run").epsilon(5e-4)) <= 3.0
    assert sum(steps(tmp_path / "run")) == taken + 1  # step 8 ran twice
    assert f"{outcome.epsilon.epsilon:.6f}" == f"{float(ledger(tmp_path / 'run').epsilon(5e-4)):.6f}"
    assert added(tmp_path / "run") == ["that the training ended early, in epoch 3: budget used up"]
    assert "the budget is used up" in capsys.readouterr().out
    before = weights(tmp_path / "run")

    go_on(tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["step"] == taken
    assert sum("test_ser" in line for line in metrics(tmp_path / "run")) == 1
    assert len(added(tmp_path / "run")) == 1
    assert has_weights(tmp_path / "run", before)


def test_a_budget_that_is_gone_before_the_first_step(tmp_path, monkeypatch) -> None:
    """Interrupted so often that nothing is left: the initial model is tested, and the ledger stays."""
    config = tiny(tmp_path / "run", epsilon=3.0)
    interrupt(config, 3, monkeypatch)
    interrupt(config, 3, monkeypatch, resume=tmp_path / "run")
    initial = weights(tmp_path / "run")
    with quiet():
        go_on(tmp_path / "run")
    assert steps(tmp_path / "run") == [3, 3]
    assert has_weights(tmp_path / "run", initial)
    assert added(tmp_path / "run") == ["that the training ended early, in epoch 1: budget used up"]
    assert go_on(tmp_path / "run").metrics


# -------------------------------------------------------------------- what goes wrong


def test_a_batch_larger_than_the_training_set(tmp_path) -> None:
    run(tiny(tmp_path / "run", batch_size=500))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 2]
    assert "smaller batch_size" in failure(flags(tmp_path / "other", batch_size=500, sampling="poisson"))


def test_a_loss_that_is_no_number_is_left_out_of_private_training(tmp_path, monkeypatch) -> None:
    """The micro-batch counts as zero; the weights stay numbers, and the metrics stay JSON."""
    forward, calls = IntentSlotModel.forward, []

    def sometimes(self, batch):
        calls.append(None)
        return forward(self, batch) * (math.nan if len(calls) == 2 else 1.0)

    monkeypatch.setattr(IntentSlotModel, "forward", sometimes)
    monkeypatch.setattr(edpsgd, "check_losses", lambda *_, **__: None)  # it would see this before the first step
    with pytest.warns(UserWarning, match="1 micro-batch.* held NaN"):
        run(tiny(tmp_path / "run"))
    first, second, _ = metrics(tmp_path / "run")
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert (first["loss"], first["discarded"]) == (None, 1)
    assert second["loss"] > 0
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "run").values())
    assert edpsgd.Ledger.read(tmp_path / "run" / "ledger.jsonl").events[0].steps == 5  # it is paid for all the same


@pytest.mark.parametrize("private", ["edp", "example"])
def test_losses_that_depend_on_other_utterances_are_refused(tmp_path, monkeypatch, private) -> None:
    """Before the first step, so that nothing was charged; plain training has nobody to protect."""
    losses = IntentSlotModel.forward
    monkeypatch.setattr(IntentSlotModel, "forward", lambda self, batch: losses(self, batch) / len(batch["mask"]))
    assert "in its batch" in failure(flags(tmp_path / "run", private=private))
    assert not edpsgd.Ledger.read(tmp_path / "run" / "ledger.jsonl").events
    run(tiny(tmp_path / "plain", private="off"))


def test_the_optimizer_knows_that_losses_were_checked(tmp_path, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(jobs, "checked_losses", set())
    monkeypatch.setattr(edpsgd.PrivateOptimizer, "note_checked_losses", lambda self: told.append(True))
    run(tiny(tmp_path / "run"))
    assert told == [True]
