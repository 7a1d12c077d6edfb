"""From the times of steps to those of epochs, against figures that are known."""

from __future__ import annotations

import pytest

from benchmarks.harness.epoch_rows import MANY, in_portions, summarise
from benchmarks.harness.epoch_rows import figures as figures_of
from benchmarks.report import readme_tables
from benchmarks.report.render import page


def steps(seconds, turns=(0,)) -> dict:
    return {(turn, step): value for turn in turns for step, value in enumerate(seconds)}


def piece(times, number, utterances=600, **about) -> dict:
    about = {"model": "clc", "corpus": "SNIPS", "is_peer": False, **about}
    sizes = {"parameters": 7, "utterances": utterances, "steps": number, "machine": {"processor": "p"}}
    return {"about": about, **sizes, "times": {name: in_portions(own, times["sgd"]) for name, own in times.items()}}


def figures(pieces: dict) -> dict:
    return figures_of(pieces, {name: {"batch": 32} for name in pieces})


def readme_table(found: dict) -> list[str]:
    """The lines of the table, and the note below it."""
    return [line for block in readme_tables.epoch_time(found) for line in block.markdown()]


def test_a_whole_epoch_is_the_sum_of_its_steps() -> None:
    sgd = steps([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    found = piece({"sgd": sgd, "edp": {key: 1.1 * value for key, value in sgd.items()}}, 6)
    row = summarise(**found["about"], found=found)
    assert row["contenders"]["edp"]["ratio"] == pytest.approx(1.1)
    assert row["contenders"]["sgd"]["seconds"] == pytest.approx(21)
    assert not row["contenders"]["edp"]["is_extrapolated"]
    assert row["paper"] == {"dp_sgd": 5.1, "edp": 1.01}


def test_the_ratio_of_a_pass_is_that_of_its_sums() -> None:
    """A slow third counts in full: 1, 1 and 10 seconds of SGD become 2, 1 and 10."""
    found = piece({"sgd": steps([1.0, 1.0, 10.0]), "example": steps([2.0, 1.0, 10.0])}, 3)
    one = summarise(**found["about"], found=found)["contenders"]["example"]
    assert one["seconds"] == pytest.approx(13)
    assert one["ratio"] == pytest.approx(13 / 12)
    assert one["ratio_spread"] == [1.0, 2.0]


def test_repeated_passes_give_the_spread() -> None:
    sgd = {**steps([1.0, 1.0], (0, 1, 2))}
    own = {key: {0: 1.0, 1: 2.0, 2: 4.0}[key[0]] for key in sgd}
    one = summarise("clc", "ATIS", False, piece({"sgd": sgd, "edp": own}, 2))["contenders"]["edp"]
    assert (one["ratio"], one["ratio_spread"], one["repetitions"]) == (2.0, [1.0, 4.0], 3)


def test_slow_contenders_are_compared_on_their_own_steps() -> None:
    """They saw the long step only: the ratio is that of this step, and the epoch is SGD's times it."""
    sgd = steps([1.0, 1.0, 10.0], (0, 1))
    found = piece({"sgd": sgd, "loop": {(0, 2): 50.0}}, 3)
    one = summarise(**found["about"], found=found)["contenders"]["loop"]
    assert (one["ratio"], one["seconds"], one["is_extrapolated"], one["measured_steps"]) == (5.0, 60.0, True, 1)


def test_a_million_utterances_follow_from_a_tenth_and_say_so() -> None:
    times = {name: steps([1.0] * 6) for name in ("sgd", "edp", "groups", "example", "loop")}
    found = figures({"many": piece(times, 1563, MANY, corpus="generated 10^5")})
    small, large = found["rows"]
    assert (large["corpus"], large["utterances"]) == ("generated 10^6", 1_000_000)
    assert (small["contenders"]["sgd"]["seconds"], large["contenders"]["sgd"]["seconds"]) == (1563, 15_625)
    assert all(one["is_extrapolated"] for row in (small, large) for one in row["contenders"].values())
    assert readme_table(found)[2] == "| CLC, generated 10<sup>5</sup> | ≈1.00 | ≈1.00 | ≈1.00 | ≈1.00 | – |"
    assert "| ≈1563.0 (1563.0–1563.0) | 1563 |" in page("epoch_time", found)


def test_rows_of_another_processor_are_marked() -> None:
    times = {name: steps([1.0] * 3) for name in ("sgd", "edp", "groups", "example", "loop")}
    pieces = {corpus: piece(times, 3, corpus=corpus) for corpus in ("ATIS", "SNIPS", "NLU-EVAL")}
    assert "*" not in "".join(readme_table(figures(pieces)))
    pieces["SNIPS"]["machine"] = {"processor": "q"}
    *table, note = readme_table(figures(pieces))
    assert [line.split(" |")[0] for line in table if "*" in line] == ["| CLC, SNIPS *"]
    assert note == r"\* on another processor: q; the others on p"


def test_parts_make_a_whole_epoch() -> None:
    """Two steps of one second and two of three; single examples took twice as long in the second part."""
    parts = {
        f"many, part {seconds}": piece(
            {"sgd": steps([seconds] * 2), "example": {(0, 1): double * seconds}}, 4, corpus="many"
        )
        for seconds, double in ((1.0, 1), (3.0, 2))
    }
    [row] = figures(parts)["rows"]
    sgd, example = row["contenders"]["sgd"], row["contenders"]["example"]
    assert (sgd["seconds"], sgd["spread"], sgd["is_extrapolated"]) == (8.0, [4.0, 12.0], False)
    assert (example["ratio"], example["ratio_spread"], example["measured_steps"]) == (7 / 4, [1.0, 2.0], 2)
    wanted = {name: {"batch": 32} for name in parts}
    assert figures_of({**parts, "many": next(iter(parts.values()))}, wanted)["rows"] == [row]  # of an earlier version
    [row] = figures({"first": parts["many, part 1.0"]})["rows"]  # the rest is not there yet
    assert (row["contenders"]["sgd"]["seconds"], row["contenders"]["sgd"]["is_extrapolated"]) == (4.0, True)
