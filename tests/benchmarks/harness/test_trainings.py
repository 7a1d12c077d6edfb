"""Trainings that are run once."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.harness import trainings


class FakeJob:
    """Stands for tasks.train: writes metrics, or not."""

    def __init__(self, folder, lines) -> None:
        self.folder, self.lines, self.commands = folder, lines, []

    def __call__(self, command, **_) -> None:
        self.commands.append(command)
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.yaml").write_text("precision: fp32")
        (self.folder / "data.json").write_text('{"train": 7}')
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        (self.folder / "metrics.jsonl").write_text(text)


LAST = {"epoch": 1, "validation_ser": 9.0, "clip_fraction": 0.5}
TEST = {"test_ser": 8.0, "test_intent_accuracy": 99.0, "test_slot_f1": 90.0, "epsilon": 2.0, "seconds": 90.0}


def test_a_training_is_run_once(tmp_path, monkeypatch) -> None:
    job = FakeJob(tmp_path / "run", [LAST, TEST])
    monkeypatch.setattr(trainings.subprocess, "run", job)
    settings = {"model": "clc", "private": "off"}
    assert trainings.train(settings, tmp_path / "run") == trainings.train(settings, tmp_path / "run") == TEST
    assert len(job.commands) == 1
    assert job.commands[0][3:] == ["--model", "clc", "--private", "off", "--output", str(tmp_path / "run")]
    scores = {name: value for name, value in TEST.items() if name != "seconds"}
    scores |= {"validation_ser": 9.0, "clip_fraction": 0.5, "epochs": 2, "utterances": 7, "minutes": 1.5}
    assert trainings.scores(tmp_path / "run") == {**scores, "precision": "fp32"}


@pytest.mark.parametrize(("has_bf16", "used"), [(True, "bf16"), (False, "fp32")])
def test_a_processor_without_bf16_trains_in_fp32(tmp_path, monkeypatch, has_bf16, used) -> None:
    job = FakeJob(tmp_path / "run", [LAST, TEST])
    monkeypatch.setattr(trainings.subprocess, "run", job)
    monkeypatch.setattr(trainings, "has_bf16", lambda device: has_bf16)
    trainings.train({"precision": "bf16"}, tmp_path / "run")
    assert job.commands[0][3:5] == ["--precision", used]


def test_an_interrupted_training_begins_again(tmp_path, monkeypatch) -> None:
    job = FakeJob(tmp_path / "run", [LAST])
    monkeypatch.setattr(trainings.subprocess, "run", job)
    with pytest.raises(RuntimeError, match="run failed: see .*run.log"):
        trainings.train({"model": "clc"}, tmp_path / "run")
    job.lines = [LAST, TEST]
    (tmp_path / "run" / "ledger.jsonl").write_text("of the first try")
    assert trainings.train({"model": "clc"}, tmp_path / "run", workers=2) == TEST
    assert job.commands[1][:4] == ["horovodrun", "-np", "2", "--gloo"]
    assert job.commands[1][-2:] == ["--output", str(tmp_path / "run")]
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_a_training_with_other_settings_is_run_again(tmp_path, monkeypatch) -> None:
    job = FakeJob(tmp_path / "run", [LAST, TEST])
    monkeypatch.setattr(trainings.subprocess, "run", job)
    for rate in (0.1, 0.1, 0.2):
        trainings.train({"learning_rate": rate}, tmp_path / "run")
    assert len(job.commands) == 2


def test_a_folder_by_another_way_is_the_same(tmp_path, monkeypatch) -> None:
    job = FakeJob(tmp_path / "run", [LAST, TEST])
    monkeypatch.setattr(trainings.subprocess, "run", job)
    monkeypatch.chdir(tmp_path)
    for data, folder in ((Path("data"), Path("run")), (tmp_path / "here" / ".." / "data", tmp_path / "run")):
        trainings.train({"data": data}, folder)
    assert len(job.commands) == 1


def test_a_line_that_is_half_written_does_not_count(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LAST) + "\n" + json.dumps(TEST)[:-3])
    assert trainings.final(tmp_path) is None
    assert trainings.metrics(tmp_path) == [LAST]


def test_two_threads_do_not_train_in_one_folder(tmp_path, monkeypatch) -> None:
    job = FakeJob(tmp_path / "run", [LAST, TEST])
    monkeypatch.setattr(trainings.subprocess, "run", job)
    threads = [threading.Thread(target=trainings.train, args=({}, tmp_path / "run")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(job.commands) == 1


_ONE_OF_TWO = """
import pathlib, sys
from benchmarks.harness import trainings
folder = pathlib.Path(sys.argv[1])

def job(command, **_):
    (folder.parent / "jobs").open("a").write("begun ")
    import time; time.sleep(0.5)
    folder.mkdir()  # an error if the other one works here
    (folder / "metrics.jsonl").write_text('{"test_ser": 8.0}\\n')

trainings.subprocess.run = job
trainings.train({}, folder)
"""


def test_two_processes_do_not_train_in_one_folder(tmp_path) -> None:
    command = [sys.executable, "-c", _ONE_OF_TWO, str(tmp_path / "run")]
    for process in [subprocess.Popen(command) for _ in range(2)]:
        assert process.wait() == 0
    assert (tmp_path / "jobs").read_text() == "begun "


def test_a_job_that_outlives_its_starter_keeps_its_folder(tmp_path, monkeypatch) -> None:
    """Who comes next waits for it, instead of beginning again beside it."""
    seen = []

    def job(command, pass_fds, **_) -> None:
        seen.extend(pass_fds)
        with open(tmp_path / "run.lock") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        FakeJob(tmp_path / "run", [LAST, TEST])(command)

    monkeypatch.setattr(trainings.subprocess, "run", job)
    trainings.train({}, tmp_path / "run")
    assert len(seen) == 1
