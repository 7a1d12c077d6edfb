"""Results files that grow piece by piece."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.harness import results


def counted(pieces: dict) -> dict:
    return {"sum": sum(piece["number"] for piece in pieces.values())}


def page(name: str, found: dict) -> str:
    return f"{name}: {found['sum']}"


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
    assert (tmp_path / "parts" / "sums.md").read_text(encoding="utf-8") == "sums: 6"


def test_what_was_measured_is_not_lost_if_no_page_can_be_made_of_it(tmp_path) -> None:
    def failing(name: str, found: dict) -> str:
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
