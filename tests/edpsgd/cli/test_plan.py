"""edpsgd plan."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.edpsgd_command import PLAN, changed, refused, run, run_json


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


def test_plot_errors_name_the_flag(capsys, tmp_path, monkeypatch) -> None:
    missing = str(tmp_path / "no" / "plan.png")
    assert f"--plot cannot be written to {missing!r}: No such file" in refused(capsys, *PLAN, "--plot", missing)
    odd = str(tmp_path / "plan.xyz")
    assert f"--plot must name a picture such as plan.png, got {odd!r}" in refused(capsys, *PLAN, "--plot", odd)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "--plot needs matplotlib" in refused(capsys, *PLAN, "--plot", str(tmp_path / "plan.png"))
