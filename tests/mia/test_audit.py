"""The command python -m mia.audit: its verdicts, its exit status, and bad input."""

from __future__ import annotations

import json

import pytest

from mia.audit import main


# -------------------------------------------------------------------- the command
def test_the_command_stands(capsys, tmp_path) -> None:
    file = tmp_path / "audit.json"
    assert main(["mechanism", "--trials", "100", "--seed", "1", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "claim: noise multiplier 1, so mu 1 and epsilon 4.37718 at delta 1e-05"
    assert lines[-1] == "verdict: the claim stands"
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["is_refuted"] is False
    assert (data["mu"], data["settings"]["workers"], data["bounds"]["trials"]) == (1.0, 1, 100)
    assert f"found: mu >= {data['bounds']['mu']:.4f}, epsilon >= {data['bounds']['epsilon']:.4f}, each" in lines[2]


def test_the_command_refutes(capsys, tmp_path) -> None:
    file = tmp_path / "audit.json"
    settings = ["--noise", "paper", "--micro-batches", "8", "--seed", "1", "--json", str(file)]
    assert main(["mechanism", "--trials", "100", *settings]) == 1
    assert "verdict: REFUTED, the mechanism leaks more than it claims" in capsys.readouterr().out
    assert json.loads(file.read_text(encoding="utf-8"))["is_refuted"] is True
    assert main(["noise", "--steps", "3", *settings]) == 1
    assert "BAD  std of layer 0: 0.17" in capsys.readouterr().out  # 1/(2·√8)
    assert json.loads(file.read_text(encoding="utf-8"))["checks"][0]["p_value"] < 1e-9


def test_the_command_on_sound_noise(capsys) -> None:
    options = ["--decay", "linear:0.5", "--epoch", "2", "--layer-scaling", "public:1,2,4", "--seed", "2"]
    assert main(["noise", "--steps", "3", *options]) == 0
    out = capsys.readouterr().out
    assert "claim: noise multiplier 0.5\n" in out
    assert " ok  shards cover every coordinate once: 0 bare, 0 noised twice, of 12600" in out
    assert "BAD" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["mechanism", "--noise-multiplier", "-1"], "noise_multiplier must be a finite number > 0, got -1.0"),
        (["mechanism", "--decay", "cubic:1"], "decay must be none, linear:TAU or exponential:TAU, got 'cubic:1'"),
        (["mechanism", "--trials", "5"], "trials must be an int >= 10, got 5"),
        (["mechanism", "--release", "scales"], "needs scaling private:Z, got 'none'"),
        (["mechanism", "--delta", "0", "--trials", "20"], "delta"),
        (["mechanism", "--unit", "example", "--noise", "paper"], "noise='paper' is defined for unit='micro_batch'"),
        (["noise", "--compression", "fp16"], "compression needs noise_placement='per_worker'"),
        (["noise", "--steps", "1"], "steps must be an int >= 2"),
        (["noise", "--steps", "2", "--json", "/no/such/folder/audit.json"], "/no/such/folder"),
    ],
)
def test_bad_input_of_the_command(options, message, capsys) -> None:
    assert main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["nonsense"], ["mechanism", "--noise", "none"]])
def test_bad_words_of_the_command(options, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err
