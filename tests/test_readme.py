"""What the READMEs say: figures come from the results, scripts run."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

import edpsgd
from benchmarks import bench
from benchmarks.harness.published import ERROR_RATES
from benchmarks.harness.recipe_jobs import EPSILONS, ROWS
from benchmarks.harness.results import RESULTS, load
from benchmarks.readme import TABLES, WHAT, updated
from benchmarks.report import render
from benchmarks.report.readme_tables import noisiest
from benchmarks.report.sections.attacks import TABLES as TABLES_OF_PHRASES
from benchmarks.report.sections.attacks import tables_of
from edpsgd import accounting, cli
from mia.attack import main as attack
from mia.audit import main as audit
from mia.secret_sharer import main as share
from tasks.synthetic_users import main as make_users
from tests.helpers.paths import ROOT
from tests.test_launchers import command, environment

README, OF_ATTACKS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "mia/README.md"))


def measured(name: str) -> dict[str, Any]:
    """Results of a benchmark that was run."""
    if not (RESULTS / f"{name}.json").exists():
        pytest.skip(f"benchmarks.{name} was not run yet, as the READMEs say")
    return load(name)


def test_the_tables_are_those_of_the_results() -> None:
    for path, tables in TABLES.items():
        text = path.read_text(encoding="utf-8")
        assert updated(path) == text
        for name in tables:  # each between its marks, once
            assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1


def test_everything_in_small() -> None:
    """All reduced benchmarks, which together take no longer than the whole."""
    results = load("bench")
    assert [row["name"] for row in results["rows"]] == list(bench.NAMES)
    assert 0 < sum(row["minutes"] for row in results["rows"]) <= results["minutes"]


def test_every_measurement_is_listed() -> None:
    """In the table of commands, and with a section in the report; it is said of what was not run yet."""
    there = {path.stem for path in RESULTS.glob("*.json")}
    assert there <= WHAT.keys() == {section.source for section in render.SECTIONS}
    listed = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert listed.count("| not measured yet |") == len(WHAT.keys() - there)


@pytest.mark.parametrize("name", WHAT)
def test_every_measurement_says_how_it_was_made(name) -> None:
    """By which command, and on which machine; figures of another one are no less complete."""
    results = measured(name)
    assert results["command"].startswith(f"python -m benchmarks.{name}") or results["command"] == f"make {name}"
    assert results["machine"]["processor"]
    assert results["machine"]["cores"] > 0
    assert results.get("is_complete", True)


def test_the_figure_to_reach() -> None:
    """An epoch of eDP-SGD takes at most 1.10 times that of Horovod's SGD, on every row."""
    results = load("epoch_time")
    rows = {(row["model"], row["corpus"]): row["contenders"] for row in results["rows"] if not row["is_peer"]}
    corpora = ("ATIS", "SNIPS", "NLU-EVAL", "generated 10^4", "generated 10^5", "generated 10^6")
    assert rows.keys() == set(itertools.product(("clc", "bert"), corpora))
    for (_, corpus), contenders in rows.items():
        assert contenders["edp"]["ratio"] <= 1.10
        assert contenders["edp"]["is_extrapolated"] == contenders["sgd"]["is_extrapolated"] == (corpus[-2:] == "^6")
    assert results["is_complete"]
    ratios = [contenders["example"]["ratio"] for contenders in rows.values()]
    assert f"at {min(ratios):.1f} to {max(ratios):.1f} times its time" in README


def test_the_figures_to_reach_in_a_step() -> None:
    """Single examples, and groups of them, take at most 1.3 (BERT) or 1.6 (CLC) times SGD's step, checks included."""
    results = load("step_time")
    assert results["is_complete"]
    for row in (row for row in results["rows"] if not row["is_peer"]):
        for name in ("groups", "example"):
            found = row["contenders"][name]
            assert found["ratio_with_checks"] <= {"bert": 1.3, "clc": 1.6}[row["kind"]]
            assert found["memory_ratio"] <= 1.5


def test_a_step_where_plain_lstms_are_faster() -> None:
    """What the README says of another processor is what was measured there."""
    results = json.loads((RESULTS / "faster_lstm" / "step_time.json").read_text(encoding="utf-8"))
    said = " ".join(README.split())
    for kind, text in (("clc", "times SGD's for CLC"), ("bert", "for BERT")):
        rows = [row["contenders"]["example"] for row in results["rows"] if row["kind"] == kind]
        ratios = [row["ratio_with_checks"] for row in rows]
        assert len(ratios) == 2
        assert f"{min(ratios):.1f} to {max(ratios):.1f} {text}" in said
        assert max(ratios) <= {"bert": 1.3, "clc": 1.6}[kind]


def test_the_paper_s_first_table() -> None:
    """All models, corpora and decays, as the command's search through the grid ends; each was attacked."""
    results = load("tradeoff")
    assert results["is_complete"]
    rows = {(row["model"], row["task"], row["decay"]) for row in results["table"]}
    corpora, decays = ("atis", "snips", "nlu-eval"), ("plain", "none", "linear", "exponential")
    assert rows == set(itertools.product(("clc", "bert"), corpora, decays))


def test_where_to_set_the_dial() -> None:
    """Single examples are best at every ε up to 10^5, and four times as many micro-batches need a tenth of it."""
    found = load("tradeoff")["frontier"]
    assert {point["unit"] for point in found["points"] if point["target"] == 10} == {"1", "4", "16", "example"}
    sers = {(point["unit"], point["target"]): point["test_ser"] for point in found["points"]}
    assert all(sers["example", target] <= ser for (_, target), ser in sers.items() if target <= 1e5)
    for (unit, target), ser in sers.items():
        finer = ({"1": "4", "4": "16"}.get(unit), target / 10)
        assert finer not in sers or abs(sers[finer] / ser - 1) < 0.2
    plain = found["plain"]["test_ser"]
    assert 1.4 * plain < sers["1", 1e6] < 1.5 * plain < 2 * plain < sers["1", 1e5]
    assert all(ser > 70 for (unit, target), ser in sers.items() if target <= 10 and unit != "example")


def test_what_single_examples_buy() -> None:
    """Error rates rise as ε falls, every training spent less than it was given, and took less than two minutes."""
    results = measured("recipes")
    assert results["is_complete"]
    rows = {(row["name"], row["epsilon"]): row for row in results["rows"]}
    assert rows.keys() == set(itertools.product(ROWS, EPSILONS))
    for name in ROWS:
        sers = [np.mean([run["test_ser"] for run in rows[name, epsilon]["runs"]]) for epsilon in EPSILONS]
        assert sers == sorted(sers, reverse=True)
    for (_, epsilon), row in rows.items():
        assert len(row["runs"]) == 3
        for run in row["runs"]:
            assert run["seconds"] < 120
            assert (run["spent"] is None) if epsilon is None else (0.98 * epsilon < run["spent"] <= epsilon)


def test_what_lira_learns_of_small_epsilon() -> None:
    """No more than (ε, δ) allows: at a false positive rate of 1 %, a true one of e^ε times that, and δ."""
    results = measured("lira")
    assert results["is_complete"]
    assert [row["epsilon"] for row in results["rows"]] == [1.0, 8.0, None]
    for row in results["rows"]:
        assert row["shadows"] == 64
        if row["spent"] is not None:
            assert row["tpr_at_1_percent"]["low"] <= 0.01 * math.exp(row["spent"]) + results["delta"]


def test_the_report_is_that_of_the_results() -> None:
    """Its text, and what is drawn; how it is drawn depends on the machine's fonts."""
    results = render.collect(RESULTS)
    built = render.build(results)
    assert (RESULTS / "report.md").read_text(encoding="utf-8") == render.markdown(built)
    page = (RESULTS / "report.html").read_text(encoding="utf-8")
    again, drawn, digest = render.html(built), re.compile(r"<svg .*?</svg>", re.DOTALL), r'<svg [^>]*data-drawn="(\w+)"'
    assert drawn.sub("", page) == drawn.sub("", again)
    assert re.findall(digest, page) == re.findall(digest, again)
    assert len(set(re.findall(digest, page))) == len(drawn.findall(page)) >= (10 if "recipes" in results else 8)


@pytest.mark.parametrize("name", WHAT)
def test_every_page_is_that_of_its_results(name) -> None:
    found = measured(name)
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == render.page(name, found)


def test_the_figures_of_the_accountant() -> None:
    """Three digits from above for every q in at most 5 s, calibration in 20 s, no sampling in 1 ms."""
    results = load("accounting")
    assert {row["rate"] for row in results["epsilon"]} >= {1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0}
    assert all(row["seconds"] <= 5 and 0 <= row["above"] <= 5e-4 for row in results["epsilon"])
    assert all(row["seconds"] <= 20 and row["epsilon"] <= 1 for row in results["calibration"])
    assert results["without_sampling"]["epsilon_ms"] < 1
    assert all(row["seconds"] < row["seconds_anew"] for row in results["growth"])


def test_the_error_rates() -> None:
    """No figure of plain training is worse than the paper's."""
    results = load("utility")
    plain = [r for r in results["runs"] if r["settings"]["private"] == "off" and r["settings"]["split"] == "random"]
    sers = {(r["settings"]["model"], r["settings"]["task"]): r["metrics"]["test_ser"] for r in plain}
    assert sers.keys() == ERROR_RATES.keys()
    assert all(ser <= ERROR_RATES[which] for which, ser in sers.items())


def test_what_the_noise_of_micro_batches_promises() -> None:
    """Every training on ATIS and SNIPS whose error rate is within 5 % of plain training's has an ε above 10⁷."""
    results = load("utility")
    runs = [run for run in results["runs"] if run["settings"]["split"] == "random"]
    for model, task in itertools.product(("clc", "bert"), ("atis", "snips")):
        ours = [run for run in runs if (run["settings"]["model"], run["settings"]["task"]) == (model, task)]
        [plain] = [run["metrics"]["test_ser"] for run in ours if run["settings"]["private"] == "off"]
        private = [run["metrics"] for run in ours if run["settings"]["private"] == "edp"]
        passed = [one["epsilon"] for one in private if one["test_ser"] <= 1.05 * plain]
        assert 0 < len(passed) < len(private)
        assert min(passed) > 1e7


def test_the_cost_of_data() -> None:
    """Less than 0.2 % of an epoch; and memory grows by the token arrays and at most 3 % more."""
    results = load("data_loading")
    assert results["examples"] == 100_000
    for model in ("clc", "bert"):
        assert results[model]["epoch"]["share"] < 0.002
        first, last = results[model]["memory"][0], results[model]["memory"][-1]
        assert last["grown"] - first["grown"] <= 1.03 * (last["arrays"] - first["arrays"])


def test_the_cost_of_an_attack() -> None:
    """Features of 100,000 utterances at no more than one and a half times the cost of plain prediction."""
    results = load("attack_cost")
    assert results["examples"] == 100_000
    assert {row["model"] for row in results["rows"]} == {"clc", "bert"}
    assert all(row["ratio"] <= 1.5 for row in results["rows"])


def test_what_attackers_learn() -> None:
    """Well above chance from a model that knows its data by heart, nothing from one that never saw them, and on ATIS
    and SNIPS less from the noisiest private model than from the plain one.
    """
    results = load("membership")
    known, unknown = results["by_heart"]["trained by heart"], results["by_heart"]["never saw them"]
    assert all(known[attack]["auc"]["low"] > 0.6 for attack in ("shadow", "lira", "loss"))
    assert all(report["auc"]["low"] <= 0.5 <= report["auc"]["high"] for report in unknown.values())
    error_rates = load("utility")
    sers, costs = {run["name"]: run["metrics"]["test_ser"] for run in error_rates["runs"]}, []
    for model, task in itertools.product(("clc", "bert"), ("atis", "snips")):
        ours = [row for row in results["corpora"] if (row["model"], row["task"]) == (model, task)]
        [plain] = [row["auc"]["value"] for row in ours if row["private"] == "off"]
        noisy = noisiest(ours)
        assert noisy["auc"]["value"] < plain
        costs.append(round(100 * (sers[noisy["name"]] / sers[f"{task}-{model}-random-0"] - 1)))
    assert f"their SER is {min(costs)} to {max(costs)} % above plain training's" in OF_ATTACKS


def test_what_is_memorised() -> None:
    """By SGD much, by FedAvg less, with noise nothing; and with a real ε."""
    results = load("memorization")
    small, large = results["scale"]["batches"][0], results["scale"]["cohorts"][1]
    rows = {(row["name"], row["batch"]): row for row in results["rows"] if not row["is_iid"]}
    sgd, fedavg, private = (rows[key] for key in (("SGD", small), ("FedAvg", large), ("DP-FedAvg", large)))
    by_sampling, by_beams = (
        [row["memorised"]["all"][how] for row in (sgd, fedavg, private)] for how in ("random_sampling", "beam_search")
    )
    for most, fewer, none in (by_sampling, by_beams):
        assert most > 2 * fewer > none == 0
    assert private["epsilon"] < 3
    assert {number for row in results["rows"] for number in tables_of(row)} == TABLES_OF_PHRASES.keys()


def test_the_cost_of_a_rank() -> None:
    """One canary against two million suffixes, with the model of full size, in at most ten minutes."""
    results = load("exposure")
    assert results["suffixes"] == 2_000_000
    assert 1_340_000 < results["parameters"] < 1_360_000
    assert all(row["seconds"] <= 600 for row in (results["unseen"], results["learned"]))
    assert results["unseen"]["seconds"] < 60
    assert "two million random suffixes takes less than a minute" in OF_ATTACKS


def test_where_noise_ends() -> None:
    """Box and Muller's method ends where the bits of the radius do: 62 on CPUs, the 32 of a Philox word on GPUs.

    Moved by 1/z standard deviations along one coordinate, what lies beyond the end gives the neighbour away.
    """
    text = " ".join(README.split())
    ends = re.search(r"Gaussian up to ([\d.]+) standard deviations.* ends at ([\d.]+)\.", text)
    multipliers = re.search(r"multipliers below ([\d.]+) \(CPU\) or ([\d.]+) \(GPU\)", text)
    assert ends is not None
    assert multipliers is not None
    for bits, end, z in zip((62, 32), map(float, ends.groups()), map(float, multipliers.groups()), strict=True):
        assert 0 < math.sqrt(2 * math.log(2) * bits) - end < 0.1
        assert norm.sf(end - 1 / z) <= 1e-5 < norm.sf(end - 1 / (z - 0.01))


EACH = "for p in model.parameters()"
FOR_TORCHRUN = {
    "import horovod.torch as hvd": "import torch.distributed as dist",
    "hvd.init()": "dist.init_process_group('gloo')",
    "hvd.rank()": "dist.get_rank()",
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)": f"[dist.broadcast(p.data, 0) {EACH}]",
}


WRITE_DOWN = """
import json, os
end = {"steps": [e.steps for e in optimizer.ledger.events], "sum": sum(p.sum().item() for p in model.parameters())}
open(f"end-{os.getpid()}", "w").write(json.dumps(end))
"""


@pytest.mark.parametrize("launcher", ["horovodrun", "torchrun", "python"])
def test_the_script_runs(tmp_path, launcher) -> None:
    found = re.search(r"```python\n(import horovod.*?)```", README, re.DOTALL)
    assert found is not None
    script = found[1] + WRITE_DOWN
    for old, new in FOR_TORCHRUN.items() if launcher == "torchrun" else ():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(script)
    started = [sys.executable, "train.py"] if launcher == "python" else command(launcher, 2, "train.py")
    done = subprocess.run(started, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end-*")]
    assert len(ends) == (1 if launcher == "python" else 2), done.stdout + done.stderr
    assert ends == [ends[0]] * len(ends)  # the workers hold the same model
    assert ends[0]["steps"] == 3 * [20 if launcher == "python" else 10]
    printed = re.search(r"print\(optimizer.epsilon.*# (.*)", script)
    assert printed is not None
    assert printed[1] in done.stdout


def test_the_snippets_with_smaller_units_run() -> None:
    """After the script, in its place: K = 4 micro-batches, then single examples."""
    found = re.search(r"```python\n(import horovod.*?)for epoch", README, re.DOTALL)
    blocks = re.findall(r"```python\n((?:optimizer.set_epoch|batches = edpsgd.Poisson).*?)```", README, re.DOTALL)
    sampler = re.search(r"`batches = (edpsgd.ShuffledBatches\(.*?\))`", README, re.DOTALL)
    assert found is not None
    assert sampler is not None
    assert len(blocks) == 2
    names: dict = {}
    try:
        exec(found[1].replace("edpsgd.ShuffledBatches(data, batch_size=4)", " ".join(sampler[1].split())), names)
        exec(blocks[0], names)
        assert [event.steps for event in names["optimizer"].ledger.events] == [5]
        exec(blocks[1], names)
        assert [event.steps for event in names["optimizer"].ledger.events] == [20]
        assert "add or remove one example" in str(names["optimizer"].epsilon(1e-5))
    finally:
        names["hvd"].shutdown()  # else other tests of this process would be workers


def test_the_accounting_example_and_the_plan_above_it() -> None:
    """The figures of the table are those of the command, rounded up."""
    found = re.search(r"```python\n(from edpsgd import LinearDecay.*?)\n(accounting.poisson.*?)  #", README, re.DOTALL)
    assert found is not None
    names: dict = {}
    exec(found[1], names)
    assert 0.99 * 8 < eval(found[2], names) <= 8
    table = re.search(r"\| ([\d.]+) \(zCDP: ([\d.]+)\) \|\n.*\| ([\d.]+) \|\n", README)
    assert table is not None
    shuffled, zcdp, poisson = (float(figure) for figure in table.groups())
    decay = edpsgd.LinearDecay(0.05)
    assert 0 < shuffled - accounting.calibrate(8.0, 1e-6, 20, decay) < 0.01
    assert 0 < zcdp - accounting.calibrate(8.0, 1e-6, 20, decay, method="zcdp") < 0.01
    assert 0 < poisson - names["z0"] < 0.01


@pytest.mark.parametrize("line", re.findall(r"^edpsgd (?:plan|epsilon) .*$", README, re.MULTILINE))
def test_the_commands_run(line, capsys) -> None:
    assert cli.main(line.split()[1:]) == 0
    assert "ε" in capsys.readouterr().out


def test_the_language_understanding_commands_run(tmp_path) -> None:
    """As printed, but for the folder: utterances are made, a model is trained on two workers, and it answers."""
    found = re.search(r"```\n(python -m tasks.generate.*?)```", README, re.DOTALL)
    assert found is not None
    (tmp_path / "runs").mkdir()
    script = found[1].replace("runs/", f"{tmp_path}/runs/")
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=ROOT,
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    answer = json.loads(done.stdout.splitlines()[-1])
    labels = json.loads((tmp_path / "runs/first/labels.json").read_text(encoding="utf-8"))
    assert answer["intent"] in labels["intents"]
    last = (tmp_path / "runs/first/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert json.loads(last)["test_ser"] < 30, "a useful model"
    assert (tmp_path / "runs/first/privacy_card.md").exists()
    found = re.search(r"```\n(python -m mia.attack.*?)```", README, re.DOTALL)
    assert found is not None
    attacking, *audits = (shlex.split(line)[3:] for line in found[1].replace("runs/", f"{tmp_path}/runs/").splitlines())
    attack(attacking)
    assert (tmp_path / "runs/first-mia/roc.png").exists()
    assert [audit(words) for words in audits] == [1, 0]  # the published noise is refuted, ours is not


def test_the_example_with_users_runs(capsys) -> None:
    """The printed ε is that of the ledger, on condition of nothing."""
    found = re.search(r"```python\n(model = torch.*?)```", README, re.DOTALL)
    assert found is not None
    exec(found[1], {"torch": torch, "edpsgd": edpsgd})
    printed = re.search(r"delta=1e-5\)\)  # (.*users?\))", found[1])
    assert printed is not None
    assert capsys.readouterr().out.strip() == printed[1]


def test_the_commands_with_users_run(tmp_path, capsys) -> None:
    """As printed, but for the folder."""
    found = re.search(r"```\n(python -m tasks.synthetic_users.*?)```", OF_ATTACKS, re.DOTALL)
    assert found is not None
    lines = [shlex.split(line) for line in found[1].replace("runs/", f"{tmp_path}/runs/").splitlines()]
    make_users(lines[0][3:])
    share(lines[1][3:])
    words = [sys.executable if word == "python" else word for word in lines[2]]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/users/privacy_card.md").exists()
    share(lines[3][3:])
    assert "rank 1 among 1000 suffixes" in capsys.readouterr().out
