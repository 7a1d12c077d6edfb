"""What an ε alone stands for: which recipe is taken, what stays as it was chosen, and what is refused."""

from __future__ import annotations

import json
import math

import pytest

from tasks.nlu import configuration, recipes
from tasks.nlu.configuration import Config
from tasks.train import main
from tests.helpers.jobs import TINY, tiny_encoder
from tests.helpers.paths import ROOT
from tests.helpers.training_commands import failure


def config(**settings) -> Config:
    return Config(**{"epsilon": 8.0, "pretrained": "an encoder", **settings})


def followed(chosen=(), utterances: int = 6500, workers: int = 1, **settings) -> Config:
    return recipes.follow(config(**settings), {"epsilon", "pretrained", *chosen, *settings}, utterances, workers).config


@pytest.mark.parametrize("model", ["bert", "clc"])
def test_every_row_can_be_followed(model) -> None:
    words = {"bert": {}, "clc": {"pretrained": None, "vectors": "some"}}[model]
    rows = [row for row in recipes.table() if row.model == model]
    assert rows
    for row in rows:
        found = followed(utterances=row.utterances, epsilon=row.epsilon, **words)
        assert (found.private, found.sampling, found.freeze, found.model) == ("example", "poisson", "encoder", model)
        assert found.batch_size == round(row.sampling_rate * row.utterances)
        steps = found.epochs * math.ceil(row.utterances / found.batch_size)
        assert abs(steps - row.steps) <= math.ceil(1 / row.sampling_rate) / 2 + 1e-9
        assert {name: getattr(found, name) for name in row.settings} == row.settings


def test_the_nearest_row_is_that_of_as_much_signal() -> None:
    """Twice the utterances at half the ε hide as much."""
    for epsilon, utterances in ((1.0, 6500), (3.0, 6500), (8.0, 2600), (0.01, 100), (1000.0, 10**6)):
        assert recipes.nearest("bert", epsilon, utterances) == recipes.nearest("bert", epsilon / 2, 2 * utterances)
    rows = [row for row in recipes.table() if row.model == "bert"]
    by_signal = sorted(rows, key=lambda row: row.epsilon * row.utterances)
    assert recipes.nearest("bert", 1e-3, 100) == by_signal[0]
    assert recipes.nearest("bert", 1e3, 10**6) == by_signal[-1]


def test_workers_share_a_step() -> None:
    one, two = followed(), followed(workers=2)
    assert two.batch_size == round(one.batch_size / 2)
    assert two.epochs == one.epochs


def test_what_is_chosen_stays() -> None:
    """Also where it is the default of a setting."""
    usual = Config(private="off")
    chosen = {name: getattr(usual, name) for name in ("epochs", "batch_size", "zero_heads", "delta", "clip_norm")}
    found = followed(**chosen)
    assert {name: getattr(found, name) for name in chosen} == chosen
    smaller = followed(batch_size=650)
    assert smaller.epochs == round(recipes.nearest("bert", 8.0, 6500).steps / 10), "as many steps as the recipe has"


def test_few_utterances_make_a_step_of_one() -> None:
    found = followed(utterances=3, workers=2)
    assert found.batch_size == 1
    assert found.delta == 0.1


@pytest.mark.parametrize(
    ("settings", "chosen", "said"),
    [
        ({"pretrained": None}, (), "--pretrained NAME_OR_FOLDER"),
        ({"pretrained": None, "model": "bert"}, (), "--pretrained NAME_OR_FOLDER"),
        ({"model": "clc"}, (), "--vectors FILE"),
        ({"optimizer": "adam"}, (), "--learning-rate"),
        ({"epsilon": None, "noise_multiplier": 1.0}, (), "epsilon"),
    ],
)
def test_refusals(settings, chosen, said) -> None:
    with pytest.raises(ValueError, match=said):
        followed(chosen, **settings)


@pytest.mark.parametrize(
    ("arguments", "is_wanted"),
    [
        (["--epsilon", "8"], True),
        (["--epsilon", "8", "--epochs", "3"], True),
        (["--epsilon", "8", "--private", "example"], False),
        (["--epsilon", "8", "--private", "edp"], False),
        (["--noise-multiplier", "1"], False),
        (["--private", "off"], False),
    ],
)
def test_a_recipe_is_for_an_epsilon_alone(arguments, is_wanted) -> None:
    chosen = recipes.chosen_beside(configuration.parse(arguments)[1])
    names = {flag[2:].replace("-", "_") for flag in arguments[::2]}
    assert chosen == (names if is_wanted else None)


def test_a_configuration_file_counts_as_chosen(tmp_path) -> None:
    (tmp_path / "settings.yaml").write_text("epsilon: 8\nprivate: example\n", encoding="utf-8")
    _, flags = configuration.parse(["--config", str(tmp_path / "settings.yaml"), "--epochs", "3"])
    assert flags.given == {"epsilon", "private", "epochs"}


def test_a_training_by_an_epsilon_alone(tmp_path, capsys) -> None:
    """The run folder has the settings that were followed, so that it can be resumed and attacked."""
    folder = tmp_path / "run"
    arguments = ["--epsilon", "8", "--pretrained", tiny_encoder(tmp_path / "encoder"), "--epochs", "2"]
    main([*arguments, "--examples", str(TINY["examples"]), "--output", str(folder), "--threads", "1"])
    said = capsys.readouterr().out
    assert "recipe of tasks/recipes.yaml for bert" in said
    assert "changed by --epochs" in said
    written = Config(**configuration.read_file(folder / "config.yaml"))
    assert (written.private, written.model, written.freeze, written.epochs) == ("example", "bert", "encoder", 2)
    assert written.delta == 0.01
    assert "at δ = 0.01" in said


def test_the_command_says_what_a_recipe_needs(tmp_path) -> None:
    said = failure(["--epsilon", "8", "--examples", "60", "--output", str(tmp_path / "run")])
    assert "--pretrained NAME_OR_FOLDER" in said
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------- what micro-batches can be expected to reach


def test_the_frontier_is_that_of_the_results() -> None:
    frontier = recipes._content()["frontier"]
    measured = json.loads((ROOT / "benchmarks" / "results" / "tradeoff.json").read_text(encoding="utf-8"))["frontier"]
    found = {(point["unit"], point["target"]): round(point["test_ser"], 1) for point in measured["points"]}
    rows = {str(number // 2): row for number, row in frontier["micro_batches"].items()}
    for unit, row in {**rows, "example": frontier["examples"]}.items():
        for epsilon, error in zip(frontier["epsilons"], row, strict=True):
            assert found.get((unit, epsilon)) == error
    assert measured["delta"] == 1e-4
    assert frontier["epsilons"] == sorted({target for _, target in found})


@pytest.mark.parametrize(
    ("settings", "workers", "said"),
    [
        ({"epsilon": 8.0}, 2, "has 95.2 % errors (SER), with single examples 21.5 %"),
        ({"epsilon": 1.0}, 1, "has more than 95 % errors"),
        ({"epsilon": 1000.0, "micro_batches": 20}, 2, "40 clipped gradients in a step are few for ε = 1000. With 32"),
    ],
)
def test_what_micro_batches_can_be_expected_to_reach(settings, workers, said) -> None:
    assert said in recipes.expectation(Config(private="edp", **settings), workers)


def test_nothing_is_expected_where_nothing_was_asked_for() -> None:
    assert recipes.expectation(Config(private="example", epsilon=8.0), 2) is None
    assert recipes.expectation(Config(private="edp", noise_multiplier=1.0), 2) is None
