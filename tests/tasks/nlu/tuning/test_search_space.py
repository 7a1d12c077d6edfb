"""What a tuning draws from."""

from __future__ import annotations

import json

import pytest

from tasks.nlu.configuration import Config
from tasks.nlu.tuning import search_space

JOB = Config(noise_multiplier=1.0, batch_size=16, epochs=4, learning_rate=0.01)


def test_a_mapping_stands_for_all_combinations(tmp_path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("learning-rate: [1e-3, 0.01]\nepochs: [2, 3]\noptimizer: sgd\n")
    found = search_space.read(file)
    assert [(one["learning_rate"], one["epochs"]) for one in found] == [(1e-3, 2), (1e-3, 3), (0.01, 2), (0.01, 3)]
    assert {one["optimizer"] for one in found} == {"sgd"}
    assert search_space.searched(found) == ["learning_rate", "epochs"]
    configs = search_space.configs(JOB, found)
    assert (configs[1].epochs, configs[1].learning_rate, configs[1].batch_size) == (3, 1e-3, 16)


def test_a_list_holds_the_candidates_themselves(tmp_path) -> None:
    file = tmp_path / "space.json"
    file.write_text(json.dumps([{"batch-size": 8}, {"batch_size": 32, "hidden": 4}]))
    assert search_space.read(file) == [{"batch_size": 8}, {"batch_size": 32, "hidden": 4}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is no YAML or JSON"),
        ("3", "there must be names with lists of values, or a list of settings"),
        ("[]", "there must be 1 to 1000 candidates, got none"),
        ("epochs: []", "got none"),
        ("epochs: [1, [2]]", "epochs must be one value in each candidate"),
        ("delta: [1e-5]", "'delta' cannot be searched"),
        ("seed: [1]", "'seed' cannot be searched"),
        ("early-stopping: [1]", "'early-stopping' cannot be searched"),
        ("unheard: [1]", "'unheard' cannot be searched"),
    ],
)
def test_what_cannot_be_searched_is_refused(tmp_path, text, message) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        search_space.read(file)
    with pytest.raises(ValueError, match="cannot read the search space"):
        search_space.read(tmp_path / "none.yaml")


def test_a_candidate_that_is_no_job_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ValueError, match="candidate 2 of the search space: epochs must be at least 1"):
        search_space.configs(JOB, [{"epochs": 3}, {"epochs": 0}])


def test_the_usual_space_is_around_the_job() -> None:
    found = search_space.around(JOB, most=100)
    assert len(found) == 27
    assert {one["batch_size"] for one in found} == {8, 16, 32}
    assert {one["epochs"] for one in found} == {2, 4, 8}
    assert {one["learning_rate"] for one in found} == {0.00333, 0.01, 0.03}
    assert JOB.given() in [one.given() | {"head_learning_rate": None} for one in search_space.configs(JOB, found)]
    assert {one["batch_size"] for one in search_space.around(JOB, most=20)} == {8, 16}
