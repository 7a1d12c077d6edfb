"""kill -9 at a random step, then --resume: the model is that of a run that nobody killed, bit for bit.

The ledger counts every step that was taken, in whichever life, so ε is that of the uninterrupted run or higher.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import edpsgd
from tests.helpers.jobs import assert_same_weights, metrics, tiny, tiny_encoder
from tests.test_launchers import ROOT, command, environment

STEPS = 10  # of two epochs
ONLY_ONE_LIFE = {"seconds", "epsilon", "clip_fraction"}  # the last begins anew with a process
SEED = 20


def settings(name: str, encoder: str) -> dict[str, Any]:
    """Both models, with dropout; both samplers, and plain training. The kills lie between checkpoints."""
    common = {"seed": 11, "dropout": 0.3}
    return {
        "clc": {**common, "word_dropout": 0.2, "checkpoint_every": 3, "decay": "linear:0.5"},
        "bert": {**common, "model": "bert", "pretrained": encoder, "sampling": "poisson", "checkpoint_every": 2},
        "plain": {**common, "private": "off", "early_stopping": 2, "checkpoint_every": 3},
    }[name]


def begin(folder: Path, workers: int = 1, **given: Any) -> list[str]:
    """The command line of a new job; ten steps on any number of workers."""
    config = tiny(folder, **{"batch_size": 12 // workers, **given})
    arguments = []
    for name, value in config.given().items():
        if value is not None and not isinstance(value, bool):  # those are off
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return [*arguments, "--no-tensorboard"]


def job(arguments: list[str], kill: tuple[str, int, int] | None = None) -> dict[str, Any]:
    named = None if kill is None else dict(zip(("place", "step", "rank"), kill, strict=True))
    return {"arguments": arguments, "kill": named}


def start(folder: Path, jobs: list[dict[str, Any]], launcher: str | None = None) -> subprocess.CompletedProcess[str]:
    """The jobs one after the other: each in a process of its own, or all on the two workers of a launcher."""
    folder.mkdir()
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"log": str(folder), "fork": launcher is None, "jobs": jobs}), encoding="utf-8")
    arguments = ["-m", "tests.helpers.killed_training", str(plan)]
    line = [sys.executable, *arguments] if launcher is None else command(launcher, 2, *arguments)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, cwd=ROOT, env=environment(), **pipes)
    try:
        said, errors = process.communicate(timeout=200)
    finally:
        if process.poll() is None:  # it hangs: nothing that it started may stay
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()
    return subprocess.CompletedProcess(line, process.returncode, said, errors)


def taken(folder: Path, number: int) -> int:
    """Steps that changed the model in that job."""
    log = folder / f"steps-{number}.log"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def charged(folder: Path) -> list[int]:
    ledger = edpsgd.Ledger.read(folder / "ledger.jsonl")
    return [event.steps for event in ledger.events if event.kind == "gradients" and event.steps]


def assert_resumed(folder: Path, whole: Path, lives: list[int]) -> None:
    """The run is the uninterrupted one; its lives took so many steps, and all of them are in the ledger."""
    assert_same_weights(folder, whole)
    found, expected = (
        [{name: value for name, value in line.items() if name not in ONLY_ONE_LIFE} for line in metrics(run)]
        for run in (folder, whole)
    )
    assert found == expected
    assert sum(lives) >= STEPS
    if (whole / "ledger.jsonl").exists():
        assert charged(whole) == [STEPS // 2] * 2
        assert sum(charged(folder)) >= sum(lives)
        epsilons = [[line["epsilon"] for line in metrics(run)] for run in (folder, whole)]
        assert all(after >= before for after, before in zip(*epsilons, strict=True))
        assert epsilons[0][-1] > epsilons[1][-1]  # some steps were paid twice
        ledger = edpsgd.Ledger.read(folder / "ledger.jsonl")
        assert epsilons[0][-1] == pytest.approx(float(ledger.epsilon(5e-4)), rel=1e-3)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


def one_process_cases() -> list[tuple[str, str, list[tuple[str, int, int]]]]:
    """Name, model and kills, one for each life but the last. Steps are random, the same in every run of the test."""
    rng = random.Random(SEED)

    def kill(place: str, low: int = 0, high: int = STEPS - 1) -> tuple[str, int, int]:
        return place, rng.randint(low, high), 0

    return [
        ("clc-step", "clc", [kill("step", 4)]),
        ("clc-twice", "clc", [kill("paid", 0, 2), kill("step", 7)]),
        ("bert-paid", "bert", [kill("paid", 3)]),
        ("bert-saving", "bert", [kill("saving", 2, 7)]),
        ("plain-step", "plain", [kill("step", 1)]),
        ("plain-saving", "plain", [kill("saving", 0, 4)]),
    ]


@pytest.mark.timeout(300)
def test_one_process(tmp_path, encoder) -> None:
    jobs = [job(begin(tmp_path / name, **settings(name, encoder))) for name in ("clc", "bert", "plain")]
    lives: dict[str, list[int]] = {}
    for name, model, kills in one_process_cases():
        begun = begin(tmp_path / name, **settings(model, encoder))
        lives[name] = list(range(len(jobs), len(jobs) + len(kills) + 1))
        jobs.append(job(begun, kills[0]))
        jobs += [job(["--resume", str(tmp_path / name)], kill) for kill in [*kills[1:], None]]
    done = start(tmp_path / "log", jobs)
    assert done.returncode == 0, done.stderr[-3000:]
    for case in one_process_cases():
        name, model, _ = case
        print(f"seed {SEED}, {case}")  # shown if it fails
        assert_resumed(tmp_path / name, tmp_path / model, [taken(tmp_path / "log", life) for life in lives[name]])


@pytest.mark.timeout(300)
def test_two_horovod_workers(tmp_path, encoder) -> None:
    """Three launches: a kill ends the one that it happens in, and the next one goes on with the run."""
    rng = random.Random(SEED)
    kills = {"clc": ("step", rng.randint(4, STEPS - 1), 1), "bert": ("paid", rng.randint(3, STEPS - 1), 0)}
    print(f"seed {SEED}, {kills}")
    new = {name: begin(tmp_path / f"{name}-2", 2, **settings(name, encoder)) for name in kills}
    whole = [job(begin(tmp_path / name, 2, **settings(name, encoder))) for name in kills]
    resume = {name: ["--resume", str(tmp_path / f"{name}-2")] for name in kills}
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "checkpoints").touch()
    blocked = job(begin(tmp_path / "blocked", 2))

    first = start(tmp_path / "1", [*whole, job(new["clc"], kills["clc"])], "horovodrun")
    second = start(tmp_path / "2", [job(resume["clc"]), job(new["bert"], kills["bert"])], "horovodrun")
    third = start(tmp_path / "3", [job(resume["bert"]), blocked], "horovodrun")
    for done in (first, second, third):
        assert done.returncode != 0, done.stdout[-3000:]
    said = "".join(done.stdout[-2000:] + done.stderr[-2000:] for done in (first, second, third))
    assert (tmp_path / "bert-2" / "privacy_card.md").exists(), said

    assert_resumed(tmp_path / "clc-2", tmp_path / "clc", [taken(tmp_path / "1", 2), taken(tmp_path / "2", 0)])
    assert_resumed(tmp_path / "bert-2", tmp_path / "bert", [taken(tmp_path / "2", 1), taken(tmp_path / "3", 0)])
    assert_only_worker_0_talks(tmp_path / "1", 0)
    assert_only_worker_0_talks(tmp_path / "3", 0)
    assert_all_workers_ended(tmp_path / "3", 1, str(tmp_path / "blocked" / "checkpoints"))


@pytest.mark.timeout(300)
def test_two_workers_of_torchrun(tmp_path, encoder) -> None:
    """Private and plain jobs, and one whose folder cannot be made: worker 0 alone knows, and all of them end."""
    (tmp_path / "file").touch()
    jobs = [
        job(begin(tmp_path / "bert", 2, **settings("bert", encoder))),
        job(begin(tmp_path / "plain", 2, **settings("plain", encoder))),
        job(begin(tmp_path / "file" / "run", 2)),
    ]
    done = start(tmp_path / "log", jobs, "torchrun")
    assert done.returncode != 0
    for number, name in enumerate(("bert", "plain")):
        assert [line["step"] for line in metrics(tmp_path / name)] == [5, 10, 10], done.stderr[-3000:]
        assert_only_worker_0_talks(tmp_path / "log", number)
    assert charged(tmp_path / "bert") == [5, 5]
    assert_all_workers_ended(tmp_path / "log", 2, str(tmp_path / "file"))


def assert_only_worker_0_talks(log: Path, number: int) -> None:
    spoken = [(log / f"{number}-{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    assert "epoch 2/2" in spoken[0]
    assert "run folder: " in spoken[0]
    assert spoken[1] == ""


def assert_all_workers_ended(log: Path, number: int, named: str) -> None:
    """With the same message, of the worker that knows and of the one that was told."""
    knows, told = ((log / f"error-{number}-{rank}.txt").read_text(encoding="utf-8") for rank in range(2))
    assert knows.startswith("error: ")
    assert named in knows
    assert told == knows.replace("error: ", "error: worker 0 failed: ", 1)
