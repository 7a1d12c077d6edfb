"""The edpsgd command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from edpsgd import card, cli, planning
from edpsgd.ledger import Ledger

TRAINING = ["--delta", "1e-5", "--examples", "8000", "--batch", "80"]
PLAN = ["plan", "--epsilon", "8", *TRAINING, "--epochs", "20"]
EPSILON = ["epsilon", "--noise", "1", *TRAINING, "--epochs", "1"]


def run(capsys, *argv: str) -> str:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def run_json(capsys, *argv: str) -> dict:
    return json.loads(run(capsys, *argv, "--json"))


def refused(capsys, *argv: str) -> str:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err.strip()


def changed(command: list[str], flag: str, value: str) -> list[str]:
    """The command with another value for the flag, which it may lack."""
    if flag not in command:
        return [*command, flag, value]
    at = command.index(flag) + 1
    return [*command[:at], value, *command[at + 1 :]]


# -------------------------------------------------------------------- plan


def test_plan_finds_the_reference_value(capsys) -> None:
    plan = run_json(capsys, *PLAN, "--decay", "linear:0.1", "--workers", "8", "--micro-batches", "5")
    assert plan["z0"] == pytest.approx(5.45845559335, rel=1e-9)  # privacy.md section 9
    assert plan["noise_multipliers"] == pytest.approx([5.45845559335 / (1 + 0.1 * t) for t in range(20)])
    assert plan["bounds"][0] == {
        "epsilon": pytest.approx(8, rel=1e-9),
        "method": "exact Gaussian",
        "neighbours": "replace or blank one example",
    }
    assert plan["bounds"][0]["epsilon"] <= 8
    assert (plan["steps_per_epoch"], plan["sampling_rate"]) == (100, 0.01)
    assert plan["noise_std_first"] == pytest.approx(2 * 5.45845559335 / 40)
    assert [row["decay"] for row in plan["comparison"]] == ["none", "linear:0.1", "exponential:0.1"]
    assert plan["decay"] == "linear:0.1"


def test_plan_compares_decays_at_the_same_target(capsys) -> None:
    plan = run_json(capsys, *PLAN)
    none, linear, exponential = plan["comparison"]
    assert plan["decay"] == "none"
    assert plan["z0"] == none["z0"] == none["last"] == none["mean"]
    assert none["z0"] == pytest.approx(2.684306, rel=1e-6)  # √20 over the μ of ε = 8
    assert linear["last"] == pytest.approx(linear["z0"] / 1.95)
    assert linear["mean"] == pytest.approx(linear["z0"] * sum(1 / (1 + 0.05 * t) for t in range(20)) / 20)
    assert exponential["last"] == pytest.approx(exponential["z0"] * 2.718281828459045**-0.95)
    assert all(row["bounds"][0]["epsilon"] == pytest.approx(8, rel=1e-9) for row in plan["comparison"])
    assert any("τ = 0.05" in note for note in plan["notes"])


def test_plan_prints_a_page(capsys) -> None:
    text = run(capsys, *PLAN, "--decay", "linear:0.1")
    assert "needs noise multiplier z0 = 5.458456\n" in text
    assert "100 per epoch, 20 epochs" in text
    assert "share of the examples in a step 0.01" in text
    assert "      10      2.729     2.599" in text  # z0/2 and z0/2.1
    methods = [line.strip()[:12] for line in text.splitlines() if line.startswith("  ε")]
    assert methods == ["ε exact Gaus", "ε zCDP, as i", "ε exact Gaus"]
    assert "τ = 0.05" not in text


def test_plan_with_poisson_sampling(capsys) -> None:
    command = [*changed(changed(PLAN, "--epochs", "5"), "--epsilon", "2.591377"), "--decay", "linear:0.1"]
    plan = run_json(capsys, *command, "--sampling", "poisson")
    assert plan["z0"] == pytest.approx(1, rel=5e-3)  # privacy.md section 9
    assert [bound["method"][:3] for bound in plan["bounds"]] == ["PLD", "RDP", "exa"]
    assert plan["bounds"][0]["epsilon"] <= 2.591377
    assert plan["bounds"][1]["epsilon"] > plan["bounds"][0]["epsilon"]


def test_plan_for_single_examples(capsys) -> None:
    plan = run_json(capsys, *PLAN, "--unit", "example", "--workers", "3")
    assert plan["noise_std_first"] == pytest.approx(plan["z0"] / 80)
    assert [bound["neighbours"] for bound in plan["bounds"][:3]] == ["blank one example"] * 2 + ["replace one example"]
    assert "replace one example" in run(capsys, *PLAN, "--unit", "example")


def test_a_decay_that_cannot_be_compared_is_left_out(capsys) -> None:
    plan = run_json(capsys, *PLAN, "--decay", "linear:100")
    assert [row["decay"] for row in plan["comparison"]] == ["none", "linear:100.0"]
    assert any("exponential:100.0 falls too fast" in note for note in plan["notes"])


def test_a_delta_that_is_too_large_is_noted(capsys) -> None:
    assert "δ should be well below 1/examples = 0.000125" in run(capsys, *changed(PLAN, "--delta", "1e-3"))
    assert "well below" not in run(capsys, *PLAN)


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_plot_is_a_picture(capsys, tmp_path, sampling: str) -> None:
    path = tmp_path / "plan.png"
    command = [*changed(PLAN, "--epochs", "3"), "--decay", "exponential:0.1", "--sampling", sampling]
    assert f"plot: {path}" in run(capsys, *command, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_the_curve_ends_at_the_target() -> None:
    training = planning.Training(1e-5, 8000, 80, 50, 1, 1, "shuffled", "micro_batch")
    ends, epsilons = training.cumulative([2.684306 * 50**0.5 / 20**0.5] * 50)
    assert (ends[-1], len(ends)) == (50, 20)
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == pytest.approx(8, rel=1e-5)


def test_plot_errors_name_the_flag(capsys, tmp_path, monkeypatch) -> None:
    missing = str(tmp_path / "no" / "plan.png")
    assert f"--plot cannot be written to {missing!r}: No such file" in refused(capsys, *PLAN, "--plot", missing)
    odd = str(tmp_path / "plan.xyz")
    assert f"--plot must name a picture such as plan.png, got {odd!r}" in refused(capsys, *PLAN, "--plot", odd)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "--plot needs matplotlib" in refused(capsys, *PLAN, "--plot", str(tmp_path / "plan.png"))


# -------------------------------------------------------------------- epsilon


def test_epsilon_of_one_epoch(capsys) -> None:
    found = run_json(capsys, *EPSILON)
    exact, zcdp, worst = (bound["epsilon"] for bound in found["bounds"])
    assert exact == pytest.approx(4.37717809568122, rel=1e-9)  # privacy.md section 9
    assert zcdp == pytest.approx(5.29852591218808, rel=1e-9)
    assert worst > 50
    text = run(capsys, *EPSILON)
    assert "ε exact Gaussian                                      4.378" in text
    assert "neighbours: replace or blank one example" in text
    assert "claimed" not in text


def test_epsilon_with_decay_and_poisson_sampling(capsys) -> None:
    command = [*changed(EPSILON, "--epochs", "5"), "--decay", "linear:0.1", "--sampling", "poisson"]
    assert run_json(capsys, *command)["bounds"][0]["epsilon"] == pytest.approx(2.591377, rel=2e-4)


def test_epsilon_of_the_published_algorithm(capsys) -> None:
    command = [*EPSILON, "--workers", "8", "--paper", "--max-scale", str(4 / 7**0.5)]
    found = run_json(capsys, *command)
    assert found["z0"] == pytest.approx(0.11692679, rel=1e-7)  # privacy.md section 3
    assert found["bounds"][0]["epsilon"] == pytest.approx(72.2365, abs=1e-4)
    assert found["claimed"]["bounds"][0]["epsilon"] == pytest.approx(4.377, abs=1e-3)
    text = run(capsys, *command)
    assert "real multiplier 0.11692679 in epoch 0" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  ε exact Gaussian  ")]
    assert row.split()[-2:] == ["4.378", "72.24"]


def test_micro_batches_and_the_default_scale_of_the_published_algorithm(capsys) -> None:
    found = run_json(capsys, *EPSILON, "--workers", "2", "--micro-batches", "8", "--paper")
    assert found["z0"] == pytest.approx(1 / 8)


def test_the_result_is_json_when_epsilon_is_infinite(capsys) -> None:
    command = [*changed(EPSILON, "--epochs", "600"), "--decay", "exponential:1"]
    bounds = run_json(capsys, *command)["bounds"]
    assert bounds[0]["epsilon"] == "inf"


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flag", "values", "allowed"),
    [
        ("--delta", ("2", "0", "1", "nan", "-1", "x", "inf"), "between 0 and 1"),
        ("--examples", ("0", "-5", "1.5", "nan", "1e3", "9" * 20), "a whole number from 1 to 1000000000000000"),
        ("--batch", ("0", "x"), "a whole number from 1 to 1000000000000000"),
        ("--epochs", ("0", "10001", "ten"), "a whole number from 1 to 10000"),
        ("--workers", ("0",), "a whole number from 1 to 1000000"),
        ("--micro-batches", ("0",), "a whole number from 1 to 1000000"),
        ("--epsilon", ("0", "-1", "nan", "inf", "1e7", "1e-7"), "from 1e-6 to 1e6"),
    ],
)
def test_bad_numbers(capsys, flag: str, values: tuple[str, ...], allowed: str) -> None:
    for value in values:
        line = refused(capsys, *changed(PLAN, flag, value))
        assert line == f"edpsgd plan: error: {flag} must be {allowed}, got {value}"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--decay", "cosine"], "--decay must be none, linear:TAU or exponential:TAU, got 'cosine'"),
        (["--decay", "linear"], "--decay must be none, linear:TAU or exponential:TAU, got 'linear'"),
        (["--decay", "linear:x"], "--decay must have a finite TAU >= 0, as in linear:0.05, got 'linear:x'"),
        (["--decay", "exponential:-1"], "--decay must have a finite TAU >= 0, as in exponential:0.05, got"),
        (["--decay", "exponential:nan"], "--decay must have a finite TAU >= 0"),
        (["--decay", "exponential:100"], "--decay exponential:100.0 cannot be computed for --epochs 20"),
        (["--sampling", "random"], "--sampling must be shuffled or poisson, got 'random'"),
        (["--unit", "user"], "--unit must be micro_batch or example, got 'user'"),
        (["--workers", "3"], "--batch must be a multiple of workers times micro-batches, 3, got 80"),
        (["--workers", "8", "--micro-batches", "3"], "--batch must be a multiple of workers times micro-batches, 24"),
        (["--unit", "example", "--micro-batches", "2"], "--micro-batches is for --unit micro_batch, got 2"),
        (["--batch", "8001"], "--batch must be at most --examples 8000, got 8001"),
        (["--plot"], "--plot expected one argument"),
        (["--noise", "1"], "unrecognized arguments: --noise 1"),
    ],
)
def test_flags_that_do_not_fit(capsys, more: list[str], message: str) -> None:
    assert message in refused(capsys, *PLAN, *more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--noise", "0"], "--noise must be from 1e-6 to 1e6, got 0"),
        (["--max-scale", "2"], "--max-scale is for --paper, got 2 without it"),
        (["--paper", "--max-scale", "0.5"], "--max-scale must be a finite number >= 1"),
        (["--paper", "--unit", "example"], "--paper is for --unit micro_batch, got --unit example"),
        (["--epochs", "20", "--decay", "exponential:100"], "--noise 1 cannot be computed with these --decay and"),
    ],
)
def test_flags_of_epsilon_that_do_not_fit(capsys, more: list[str], message: str) -> None:
    assert refused(capsys, *EPSILON, *more).startswith(f"edpsgd epsilon: error: {message}")


def test_missing_flags_and_commands(capsys) -> None:
    assert "--epsilon" in refused(capsys, "plan", *TRAINING, "--epochs", "1")
    assert "plan|epsilon|card" in refused(capsys)
    assert "'train'" in refused(capsys, "train")


def test_help(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--help"])
    assert stopped.value.code == 0
    assert "--micro-batches" in capsys.readouterr().out


# -------------------------------------------------------------------- card


@pytest.fixture
def folder(tmp_path):
    """A run of one epoch with noise multiplier 1."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.begin_run({"workers": 3})
    ledger.open_epoch(0, "shuffled")
    ledger.charge(1.0)
    ledger.close()
    return tmp_path


def test_card_of_a_folder_and_of_a_file(capsys, folder) -> None:
    text = run(capsys, "card", str(folder), "--delta", "1e-5")
    assert text.startswith("# Privacy card\n\n**ε = 4.378 at δ = 1e-05** (exact Gaussian")
    assert "3 workers" in text
    assert run(capsys, "card", str(folder / "ledger.jsonl"), "--delta", "1e-5") == text
    data = run_json(capsys, "card", str(folder), "--delta", "1e-5")
    assert data["epsilon"] == pytest.approx(4.37717809568122, rel=1e-9)


def test_card_takes_delta_from_the_card_of_the_run(capsys, folder) -> None:
    assert "--delta must be given, since there is no" in refused(capsys, "card", str(folder))
    card.write(folder, Ledger(), 1e-3)
    assert run_json(capsys, "card", str(folder))["delta"] == 1e-3
    assert run_json(capsys, "card", str(folder), "--delta", "1e-6")["delta"] == 1e-6
    for damaged in ("{", "[]", '{"delta": 7}', '{"delta": null}', "{}"):
        (folder / "privacy_card.json").write_text(damaged)
        assert "holds none that can be read" in refused(capsys, "card", str(folder))


def test_card_keeps_what_the_run_says_of_itself(capsys, folder) -> None:
    """The metrics are not shown again, so they are not in the list either."""
    ledger = Ledger.read(folder / "ledger.jsonl")
    card.write(folder, ledger, 1e-3, {"SER": 0.5}, not_covered=["the word list: read from the training set"])
    plain = card.make(ledger, 1e-3).not_covered
    for command in (["card", str(folder)], ["card", str(folder / "ledger.jsonl"), "--delta", "1e-5"]):
        data = run_json(capsys, *command)
        assert data["not_covered"] == ["the word list: read from the training set", *plain]
        assert "- the word list: read from the training set\n" in run(capsys, *command)


@pytest.mark.parametrize("damaged", ["{", "[]", "{}", '{"not_covered": "all"}', '{"not_covered": [7]}', "\xff"])
def test_card_beside_a_card_that_cannot_be_read(capsys, folder, damaged) -> None:
    path = folder / "privacy_card.json"
    path.write_bytes(damaged.encode("latin-1"))
    message = f"RUN {path} cannot be read, and may say more of what ε does not cover: restore or remove it"
    assert message in refused(capsys, "card", str(folder), "--delta", "1e-5")


def test_card_without_a_ledger(capsys, tmp_path) -> None:
    line = refused(capsys, "card", str(tmp_path), "--delta", "1e-5")
    assert line == (
        "edpsgd card: error: RUN must be a ledger file or a folder with ledger.jsonl in it, got " + repr(str(tmp_path))
    )
    missing = str(tmp_path / "nothing")
    for more in ([], ["--delta", "1e-5"]):
        line = refused(capsys, "card", missing, *more)
        wanted = "RUN must be a ledger file or a folder with ledger.jsonl in it"
        assert line == f"edpsgd card: error: {wanted}, got {missing!r}"


def test_card_of_a_damaged_ledger(capsys, folder) -> None:
    path = folder / "ledger.jsonl"
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:-3], "ends in the middle of a line"),
        (whole.replace(b"1.0", b"9.0"), "the checksum does not match"),
        (b"hello\n", "line 1: not a ledger entry"),
        (b"\xff\xfe\n", "line 1: not a ledger entry"),
    ):
        path.write_bytes(damaged)
        assert message in refused(capsys, "card", str(folder), "--delta", "1e-5")


def test_card_of_a_ledger_of_another_version(capsys, tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger._write({"index": 0, "event": {"kind": "gradients", "epoch": 0, "shape": "round"}})
    ledger.close()
    assert refused(capsys, "card", str(tmp_path), "--delta", "1e-5").startswith("edpsgd card: error: RUN ")


def test_card_of_batches_that_cannot_be_accounted(capsys, tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open_epoch(0, "quasi-random")
    ledger.charge(1.0)
    ledger.close()
    assert "cannot be accounted for: quasi-random" in refused(capsys, "card", str(tmp_path), "--delta", "1e-5")


def test_card_names_a_bad_delta(capsys, folder) -> None:
    assert "--delta must be between 0 and 1, got 2" in refused(capsys, "card", str(folder), "--delta", "2")


# -------------------------------------------------------------------- as a process


def test_as_a_module_with_a_full_disk() -> None:
    command = [sys.executable, "-m", "edpsgd.cli", *EPSILON]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "exact Gaussian" in done.stdout
    with open("/dev/full", "w") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert failed.returncode == 2
    assert failed.stderr == "edpsgd: error: the output cannot be written: No space left on device\n"
