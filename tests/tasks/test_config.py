"""Settings of a training job: where they come from, what is refused, and what may change when a run goes on."""

from __future__ import annotations

import pytest
import yaml

from tasks.nlu.configuration import Config, parse, read_file, write_file

PRIVATE = ["--noise-multiplier", "1"]


def refused(capsys, *arguments: str) -> str:
    """What the command says before it ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        parse(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


def written(folder, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_defaults() -> None:
    config, flags = parse(PRIVATE)
    assert config == Config(noise_multiplier=1.0)
    assert (config.task, config.model, config.private, config.sampling) == ("generated", "clc", "edp", "shuffled")
    assert (flags.config, flags.resume, flags.dry_run) == (None, None, False)


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


def test_an_empty_name_of_the_data_is_refused(capsys) -> None:
    """As an unset variable of the shell gives it."""
    assert "data must be the folder or file to read" in refused(capsys, "--task", "jsonl", "--data", "", *PRIVATE)


def test_files_that_cannot_be_read(tmp_path, capsys) -> None:
    assert "missing.yaml" in refused(capsys, "--config", str(tmp_path / "missing.yaml"), *PRIVATE)
    assert "a.toml" in refused(capsys, "--config", written(tmp_path, "a.toml", "epochs: 3"), *PRIVATE)
    (tmp_path / "b.yaml").write_bytes(b"task: \xff")
    assert "b.yaml" in refused(capsys, "--config", str(tmp_path / "b.yaml"), *PRIVATE)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *((name, "0") for name in ("--examples", "--epochs", "--batch-size", "--micro-batches", "--hidden")),
        *((name, "0") for name in ("--layers", "--dimension", "--max-words", "--bucket-size", "--threads")),
        *((name, "0") for name in ("--learning-rate", "--head-learning-rate", "--clip-norm", "--early-stopping")),
        *((name, "-1") for name in ("--weight-decay", "--checkpoint-every", "--seed", "--dropout", "--warmup")),
        *((name, "1") for name in ("--dropout", "--word-dropout", "--warmup", "--delta")),
        ("--delta", "0"),
        ("--clip-norm", "nan"),
        ("--clip-norm", "inf"),
        ("--epochs", "1.5"),
        ("--epochs", "x"),
        ("--seed", str(2**63)),
        ("--model", "lstm"),
        ("--task", "imdb"),
        ("--sampling", "random"),
        ("--device", "tpu"),
        ("--private", "yes"),
    ],
)
def test_flags_out_of_range(capsys, flag, value) -> None:
    assert flag[2:].replace("-", "_") in refused(capsys, *PRIVATE, flag, value).replace("-", "_")


def test_unknown_flags(capsys) -> None:
    assert "--colour" in refused(capsys, *PRIVATE, "--colour", "red")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--epsilon or --noise-multiplier"),
        (["--epsilon", "3", "--noise-multiplier", "1"], "one of the two"),
        (["--epsilon", "0"], "epsilon"),
        (["--noise-multiplier", "-1"], "noise_multiplier"),
        (["--private", "example", "--micro-batches", "2", *PRIVATE], "--micro-batches"),
        (["--noise", "paper", "--epsilon", "3"], "--noise paper"),
        (["--noise", "paper", "--private", "example", *PRIVATE], "--noise paper"),
        (["--layer-scaling", "raw", "--epsilon", "3"], "--layer-scaling raw"),
        (["--task", "atis", *PRIVATE], "data"),
    ],
)
def test_settings_that_contradict_each_other(capsys, arguments, named) -> None:
    assert named in refused(capsys, *arguments)


def test_plain_training_needs_no_privacy_settings() -> None:
    assert parse(["--private", "off"])[0].private == "off"


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
