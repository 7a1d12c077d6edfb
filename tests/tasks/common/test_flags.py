"""Settings from files and flags, and what may change when a run goes on."""

from __future__ import annotations

import pytest
import yaml

from tasks.nlu.configuration import Config, parse, read_file, write_file
from tests.helpers.command_lines import refused

PRIVATE = ["--noise-multiplier", "1"]


def written(folder, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "epochs: 7\nbatch-size: 5\nlearning_rate: 1e-3\ntrain_vectors: true\nprivate: off\nseed: null\n"),
        ("a.toml", 'epochs = 7\nbatch-size = 5\nlearning_rate = 1e-3\ntrain_vectors = true\nprivate = "off"\n'),
    ],
)
def test_flags_over_a_file_over_defaults(tmp_path, name, text) -> None:
    config, _ = parse(["--config", written(tmp_path, name, text), "--epochs", "9", "--no-train-vectors"])
    assert config == Config(epochs=9, batch_size=5, learning_rate=1e-3, train_vectors=False, private="off")


def test_dry_run_and_booleans() -> None:
    config, flags = parse([*PRIVATE, "--dry-run", "--skip-bad-lines", "--no-tensorboard"])
    assert flags.dry_run
    assert (config.skip_bad_lines, config.tensorboard) == (True, False)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epoch: 3", "epoch"),
        ("resume: runs/1", "resume"),
        ("epochs: many", "epochs"),
        ("epochs: 2.5", "epochs"),
        ("epochs: true", "epochs"),
        ("epochs: null", "epochs"),
        ("clip_norm: [1]", "clip_norm"),
        ("clip_norm: .nan", "clip_norm"),
        ("learning_rate: .inf", "learning_rate"),
        ("tensorboard: 1", "tensorboard"),
        ("model: lstm", "model"),
        ("task: 5", "task"),
        ("model: off", "model"),
        ("3", "names and values"),
        ("a: b: c", "is no YAML, line 1"),
    ],
)
def test_a_file_with_something_wrong(tmp_path, capsys, text, named) -> None:
    """The error names the setting."""
    assert named in refused(capsys, "--config", written(tmp_path, "a.yaml", text), *PRIVATE)


def test_the_text_of_a_file_is_not_told(tmp_path, capsys) -> None:
    """It may be the data, by mistake."""
    text = '{"text": "my card is 4111"}\n{"text": "call anna"}\n'
    for name in ("a.yaml", "a.toml"):
        said = refused(capsys, "--config", written(tmp_path, name, text), *PRIVATE)
        assert f"{name} is no" in said
        assert not any(word in said for word in ("4111", "anna"))


def test_files_that_cannot_be_read(tmp_path, capsys) -> None:
    assert "missing.yaml" in refused(capsys, "--config", str(tmp_path / "missing.yaml"), *PRIVATE)
    assert "a.toml" in refused(capsys, "--config", written(tmp_path, "a.toml", "epochs: 3"), *PRIVATE)
    (tmp_path / "b.yaml").write_bytes(b"task: \xff")
    assert "b.yaml" in refused(capsys, "--config", str(tmp_path / "b.yaml"), *PRIVATE)


def test_unknown_flags(capsys) -> None:
    assert "--colour" in refused(capsys, *PRIVATE, "--colour", "red")


def test_a_configuration_is_written_as_it_is_read(tmp_path) -> None:
    config = Config(private="off", learning_rate=1e-5, delta=1e-7, data="d/é: x", decay="none", seed=2**62, output="o")
    write_file(tmp_path / "config.yaml", config)
    assert Config(**read_file(tmp_path / "config.yaml")) == config
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


class TestResume:
    """A run goes on with its own settings."""

    @pytest.fixture
    def run(self, tmp_path) -> str:
        write_file(tmp_path / "config.yaml", Config(noise_multiplier=1.0, epochs=7, output="elsewhere", threads=3))
        return str(tmp_path)

    def test_its_own_settings(self, run) -> None:
        config, flags = parse(["--resume", run])
        assert (config.epochs, config.noise_multiplier, config.threads, config.output) == (7, 1.0, 3, run)
        assert flags.resume == run

    def test_the_machines_may_change(self, run) -> None:
        flags = ["--threads", "1", "--checkpoint-every", "5", "--device", "cpu", "--no-tensorboard"]
        config, _ = parse(["--resume", run, *flags, "--bucket-size", "4"])
        found = (config.threads, config.checkpoint_every, config.device, config.tensorboard, config.bucket_size)
        assert found == (1, 5, "cpu", False, 4)
        assert config.epochs == 7

    def test_the_same_again_is_no_change(self, run) -> None:
        assert (
            parse(["--resume", run, "--epochs", "7", "--noise-multiplier", "1.0", "--output", f"{run}/"])[0].epochs == 7
        )

    @pytest.mark.parametrize(
        "flags",
        [
            ["--epochs", "8"],
            ["--noise-multiplier", "0.5"],
            ["--epsilon", "3"],
            ["--private", "off"],
            ["--delta", "1e-3"],
            ["--seed", "1"],
            ["--output", "runs/other"],
        ],
    )
    def test_others_may_not(self, run, capsys, flags) -> None:
        said = refused(capsys, "--resume", run, *flags)
        assert f"{flags[0]} cannot change" in said

    def test_nor_by_a_file(self, run, tmp_path, capsys) -> None:
        file = written(tmp_path, "other.yaml", yaml.safe_dump({"epochs": 8}))
        assert "--epochs cannot change" in refused(capsys, "--resume", run, "--config", file)

    def test_a_folder_that_holds_no_run(self, tmp_path, capsys) -> None:
        assert str(tmp_path / "config.yaml") in refused(capsys, "--resume", str(tmp_path))
