"""Results files that grow piece by piece, and trainings that are run once."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.harness import results, trainings


def counted(pieces: dict) -> dict:
    return {"sum": sum(piece["number"] for piece in pieces.values())}


def page(found: dict) -> str:
    return f"{found['sum']} {results.made(found)}"


class Works:
    """Gives numbers, and counts how often it is asked; a number of 0 stands for an interruption."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, number: int) -> dict:
        self.calls.append(number)
        if number == 0:
            raise KeyboardInterrupt
        return {"number": number}


def run(folder, numbers, works, anew=False, settings=None) -> dict:
    kept = results.Pieces(folder, "sums", counted, page, "python -m sums", anew)
    for key, number in numbers.items():
        kept.get(key, lambda number=number: works(number), settings)
    return results.load("sums", folder)


def figures(found: dict) -> dict:
    """Without how long it took."""
    pieces = {key: piece["number"] for key, piece in found["pieces"].items()}
    return {"sum": found["sum"], "command": found["command"], "pieces": pieces}


def test_interrupting_and_going_on_gives_the_same_figures(tmp_path) -> None:
    whole = run(tmp_path / "whole", {"a": 1, "b": 2, "c": 3}, Works())
    works = Works()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", {"a": 1, "b": 0}, works)
    found = run(tmp_path / "parts", {"a": 1, "b": 2, "c": 3}, works)
    assert works.calls == [1, 0, 2, 3]  # a once
    assert figures(found) == figures(whole)
    assert found["minutes"] == pytest.approx(sum(piece["minutes"] for piece in found["pieces"].values()))
    assert (tmp_path / "parts" / "sums.md").read_text(encoding="utf-8").startswith("6 Made by `python -m sums`, 0 min")


def test_what_was_measured_is_not_lost_if_no_page_can_be_made_of_it(tmp_path) -> None:
    def failing(found: dict) -> str:
        raise KeyError("a column")

    run(tmp_path, {"a": 1}, Works())
    broken = results.Pieces(tmp_path, "sums", counted, failing, "python -m sums")
    with pytest.raises(KeyError, match="a column"):
        broken.get("b", lambda: {"number": 2})
    works = Works()
    assert figures(run(tmp_path, {"a": 1, "b": 2}, works))["pieces"] == {"a": 1, "b": 2}
    assert works.calls == []


def test_a_piece_may_know_how_long_it_took_and_be_measured_again(tmp_path) -> None:
    kept = results.Pieces(tmp_path, "sums", counted, page, "python -m sums")
    assert kept.get("a", lambda: {"number": 1, "minutes": 7.0})["minutes"] == 7.0
    assert kept.get("a", lambda: {"number": 2}, again=True)["number"] == 2
    assert kept.get("a", lambda: {"number": 3})["number"] == 2


def test_pieces_that_are_not_there_as_wanted(tmp_path) -> None:
    pieces = {"a": {"settings": {"rounds": 2}}, "b": {"settings": {"rounds": 3}}, "c": {}}
    assert results.missing(pieces, {name: {"rounds": 2} for name in "abcd"}) == ["b", "c", "d"]


def test_a_choice_that_chooses_nothing_is_an_error() -> None:
    names = ["frontier-1", "frontier-16", "clc-atis"]
    assert results.chosen(Namespace(only="", page=False), names) == names
    assert results.chosen(Namespace(only="frontier", page=False), names) == names[:2]
    assert results.chosen(Namespace(only="frontier-1", page=False), names) == ["frontier-1"]
    assert results.chosen(Namespace(only="", page=True), names) == []
    with pytest.raises(SystemExit, match="--only atsi: that is in no name of frontier-1; frontier-16; clc-atis"):
        results.chosen(Namespace(only="atsi", page=False), names)


def test_pieces_are_measured_anew_on_request(tmp_path) -> None:
    """Those that were asked for; others stay."""
    run(tmp_path, {"a": 1, "b": 2}, Works())
    assert figures(run(tmp_path, {"a": 5}, Works(), anew=True))["pieces"] == {"a": 5, "b": 2}


def test_pieces_of_other_settings_are_measured_again(tmp_path) -> None:
    works = Works()
    for rate in (0.1, 0.1, 0.2, 0.2):
        run(tmp_path, {"a": 1}, works, settings={"rate": rate, "sizes": (1, 2)})
    assert works.calls == [1, 1]


def test_two_processes_keep_each_others_pieces(tmp_path) -> None:
    one, other = (results.Pieces(tmp_path, "sums", counted, page, "sums") for _ in range(2))
    one.get("a", lambda: {"number": 1})
    other.get("b", lambda: {"number": 2})
    one.get("c", lambda: {"number": 3})
    assert results.load("sums", tmp_path)["sum"] == 6


def test_rows_that_were_not_made_again_are_kept(tmp_path) -> None:
    """Run folders may be on another machine."""

    def write(processor: str, **rows: int) -> dict:
        new = {"machine": {"processor": processor}, "rows": [{"name": name, "n": n} for name, n in rows.items()]}
        found = results.merged(tmp_path, "some", new, "rows", lambda row: row["name"])
        results.save(tmp_path, "some", found, "")
        return found

    assert write("p", b=1, a=2)["rows"] == [{"name": "a", "n": 2}, {"name": "b", "n": 1}]
    assert write("q", b=3, c=4) == {
        "machine": {"processor": "p, q"},
        "rows": [{"name": "a", "n": 2}, {"name": "b", "n": 3}, {"name": "c", "n": 4}],
    }
    assert write("q", b=3)["machine"] == {"processor": "p, q"}
    assert write("r")["machine"] == {"processor": "p, q"}  # which has made nothing
    assert write("r", a=0, b=0, c=0)["machine"] == {"processor": "r"}


def test_reduced_figures_stay_away_from_real_ones() -> None:
    parser = results.reducible("x", None)
    parser.add_argument("--runs", type=Path, default=Path("runs/x"))
    whole, reduced = parser.parse_args([]), parser.parse_args(["--reduced"])
    assert (whole.reduced, whole.out, whole.runs) == (False, results.RESULTS, Path("runs/x"))
    assert (reduced.reduced, reduced.out, reduced.runs) == (True, Path("runs/bench"), Path("runs/bench/x"))
    for words in (["--out", "here", "--reduced"], ["--reduced", "--out", "here"]):
        assert parser.parse_args(words).out == Path("here")


def test_pieces_of_other_machines_are_told(tmp_path) -> None:
    run(tmp_path, {"a": 1}, Works())
    found = results.load("sums", tmp_path)
    found["pieces"]["a"]["machine"] |= {"processor": "another", "torch": "0.1"}
    (tmp_path / "sums.json").write_text(json.dumps(found), encoding="utf-8")
    both, here = run(tmp_path, {"a": 1, "b": 2}, Works())["machine"], results.machine()
    assert (both["processor"], both["torch"]) == (f"another, {here['processor']}", f"0.1, {here['torch']}")
    assert {**both, "processor": 0, "torch": 0} == {**here, "processor": 0, "torch": 0}


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
