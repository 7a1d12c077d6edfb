"""Time and memory of a training step: Horovod's SGD, ours with units from a batch to an example, and Opacus.

    python -m benchmarks.step_time [--rounds 20] [--only bert] [--out benchmarks/results]

Two Horovod workers with one thread each, Adam. All contenders of a model take turns in one process, so that a slow
moment of the machine hits them alike; a ratio compares two steps of the same round. Peak memory is taken in processes
of their own. Opacus runs on variants of the models that it can train, beside plain training and ours on the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import edpsgd
from benchmarks.contenders import NAMES, OURS, PEERS, Contender, make, make_batches
from edpsgd import clipping, gradients
from edpsgd.units import UnitGradients

WORKERS = 2
KINDS = {"bert": "BERT", "clc": "CLC"}
SHAPES = ((14, 32), (30, 32), (14, 128), (30, 128))  # tokens, examples of a worker
PEER_SHAPES = SHAPES[:2]  # a gradient for each of 128 examples does not fit into this machine
RESULTS = Path(__file__).parent / "results"
SLOW = ("loop", "opacus_hooks")  # fewer rounds
WARM_UP, SLOW_ROUNDS, TIMED_STEPS = 3, 3, 6
PARTS = {
    "backward": "backward and norms",
    "sums": "weighted sums",
    "norm": "norm",
    "scale": "scale",
    "noise": "noise",
    "ledger": "ledger",
    "wire": "wire",
    "adam": "Adam",
    "rest": "forward and the rest",
    "whole": "all",
}


# -------------------------------------------------------------------- what the two workers run


@contextmanager
def stopwatch(optimizer: edpsgd.PrivateOptimizer) -> Iterator[dict[str, float]]:
    """Seconds spent in each part of a private step."""
    spent: dict[str, float] = {}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] = spent.get(part, 0.0) + time.perf_counter() - start

        return wrapper

    places: list[tuple[Any, str, str]] = [
        (clipping, "layer_norms", "norm"),
        (gradients.GradientSum, "add_", "scale"),
        (gradients.GradientSum, "add_noise_", "noise"),
        (type(optimizer.ledger), "charge", "ledger"),
        (type(optimizer._collective), "sum_", "wire"),
        (type(optimizer._inner), "step", "adam"),
        (UnitGradients, "backward", "backward"),
        (UnitGradients, "add_weighted_", "sums"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    try:
        for (owner, name, part), original in zip(places, originals, strict=True):
            setattr(owner, name, timed(part, original))
        yield spent
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def measure_time(kind: str, tokens: int, size: int, is_peer: bool, rounds: int, folder: Path) -> dict[str, Any]:
    """Interleaved steps of all contenders, in seconds, and where the time of ours goes."""
    import horovod.torch as hvd

    names = PEERS if is_peer else OURS
    all_of_them = {name: make(name, kind, size, is_peer, folder) for name in names}
    batches = make_batches(kind, tokens, size, hvd.rank())
    times: dict[str, list[float | None]] = {name: [] for name in names}
    for number in range(WARM_UP + rounds):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            if name in SLOW and number >= WARM_UP + SLOW_ROUNDS:
                times[name].append(None)
                continue
            hvd.barrier()
            start = time.perf_counter()
            all_of_them[name].step(*batches)
            times[name].append(time.perf_counter() - start)
    parts = {}
    for name in ("edp_sharded", "edp_per_worker", "groups", "example") if not is_peer else ():
        found = [_parts(all_of_them[name], batches) for _ in range(TIMED_STEPS)]
        parts[name] = {part: statistics.median(one.get(part, 0.0) for one in found) for part in PARTS}
    return {
        "parameters": sum(p.numel() for p in all_of_them["sgd"].model.parameters()),
        "times": {name: values[WARM_UP:] for name, values in times.items()},
        "parts": parts,
    }


def _parts(contender: Contender, batches: Any) -> dict[str, float]:
    with stopwatch(contender.optimizer) as spent:
        start = time.perf_counter()
        contender.step(*batches)
    whole = time.perf_counter() - start
    return {**spent, "rest": whole - sum(spent.values()), "whole": whole}


def measure_memory(kind: str, tokens: int, size: int, is_peer: bool, contender: str, folder: Path) -> dict[str, float]:
    """Peak resident memory of a process that does nothing else, in MiB."""
    import horovod.torch as hvd

    chosen = make(contender, kind, size, is_peer, folder)
    batches = make_batches(kind, tokens, size, hvd.rank())
    for _ in range(2 if contender in SLOW else 4):
        chosen.step(*batches)
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def work(job: dict[str, Any], folder: Path) -> None:
    """The part of one worker; worker 0 writes the result."""
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    measure = measure_memory if "contender" in job else measure_time
    result = measure(**job, folder=folder)
    if hvd.rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))


# -------------------------------------------------------------------- what starts them and writes the report


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job on two workers."""
    with tempfile.TemporaryDirectory() as folder:
        module = [sys.executable, "-m", "benchmarks.step_time", "--job", json.dumps(job), "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        subprocess.run(["horovodrun", "-np", str(WORKERS), "--gloo", *module], env=environment, check=True)
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return result


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def summarise(job: dict[str, Any], measured: dict[str, Any], memory: dict[str, float]) -> dict[str, Any]:
    """Medians, ratios within rounds, and the parts of a step."""
    times = measured["times"]
    contenders = {}
    for contender in times:
        pairs = [(own, sgd) for own, sgd in zip(times[contender], times["sgd"], strict=True) if own is not None]
        contenders[contender] = {
            "milliseconds": [1e3 * q for q in quartiles([own for own, _ in pairs])],
            "ratio_to_sgd": quartiles([own / sgd for own, sgd in pairs]),
            "steps": len(pairs),
            "peak_mib": memory[contender],
            "memory_ratio": memory[contender] / memory["sgd"],
        }
    parts = {name: {k: 1e3 * v for k, v in found.items()} for name, found in measured["parts"].items()}
    return {**job, "parameters": measured["parameters"], "contenders": contenders, "parts_ms": parts}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import horovod
    import opacus
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return {
        "processor": ", ".join(sorted(names)) or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "horovod": horovod.__version__,
        "transformers": transformers.__version__,
        "opacus": opacus.__version__,
        "edpsgd": edpsgd.__version__,
    }


def to_markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    about = report["machine"]
    lines = [
        "# Time and memory of a training step",
        "",
        f"Made by `{report['command']}` in {report['minutes']:.0f} minutes on {about['cores']} cores of "
        f"{about['processor']}; Python {about['python']}, torch {about['torch']}, Horovod {about['horovod']} (Gloo), "
        f"transformers {about['transformers']}, Opacus {about['opacus']}.",
        "",
        f"{WORKERS} workers with one thread each, Adam, the ledger on disk. Medians, quartiles in brackets; ratios "
        "compare steps of the same round. Memory is the peak of a worker, with Python and libraries. BERT has the "
        "paper's configuration, CLC learns its word vectors; both end in a CRF.",
    ]
    for row in report["rows"]:
        lines += ["", f"## {_title(row)}", ""]
        lines += ["| | ms per step | over SGD | peak memory, MiB | over SGD |", "|---|---|---|---|---|"]
        for contender, figures in row["contenders"].items():
            low, mid, high = figures["milliseconds"]
            ratio = "{1:.3f} ({0:.3f} to {2:.3f})".format(*figures["ratio_to_sgd"])
            memory = f"{figures['peak_mib']:.0f} | {figures['memory_ratio']:.2f}"
            lines.append(f"| {NAMES[contender]} | {mid:.0f} ({low:.0f} to {high:.0f}) | {ratio} | {memory} |")
        if row["parts_ms"]:
            lines += ["", f"| of a private step, ms | {' | '.join(PARTS.values())} |", "|---" * (1 + len(PARTS)) + "|"]
        for contender, parts in row["parts_ms"].items():
            lines.append(f"| {NAMES[contender]} | {' | '.join(f'{parts[part]:.1f}' for part in PARTS)} |")
    return "\n".join(lines) + "\n"


def _title(row: dict[str, Any]) -> str:
    variant = {"bert": "BERT without CRF", "clc": "BiLSTM without CRF and characters"}
    name = (variant if row["is_peer"] else KINDS)[row["kind"]]
    return f"{name}, {row['parameters'] / 1e6:.1f} M parameters, {row['tokens']} tokens, batch {row['size']}"


def readme_table(report: dict[str, Any]) -> str:
    """The ratios, for the README."""
    peers = {_shape(row): row["contenders"] for row in report["rows"] if row["is_peer"]}
    names = [name for name in NAMES if name != "sgd"]
    lines = [f"| | {' | '.join(NAMES[name] for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for row in report["rows"]:
        if not row["is_peer"]:
            found = {**peers.get(_shape(row), {}), **row["contenders"]}
            cells = [f"{found[name]['ratio_to_sgd'][1]:.2f}" if name in found else "–" for name in names]
            head = f"{KINDS[row['kind']]}, {row['tokens']} tokens, batch {row['size']}"
            lines.append(f"| {head} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shape(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["kind"], row["tokens"], row["size"]


def update_readme(report: dict[str, Any], path: Path) -> None:
    """Writes the table between its marks."""
    before, rest = path.read_text().split("<!-- step_time -->")
    _, after = rest.split("<!-- /step_time -->")
    path.write_text(f"{before}<!-- step_time -->\n{readme_table(report)}\n<!-- /step_time -->{after}")


def jobs(only: str) -> list[dict[str, Any]]:
    """What is measured: every model in every shape, and the variants of the peers."""
    found = [
        {"kind": kind, "tokens": tokens, "size": size, "is_peer": is_peer}
        for is_peer, shapes in ((False, SHAPES), (True, PEER_SHAPES))
        for kind in KINDS
        for tokens, size in shapes
    ]
    return [job for job in found if only in f"{job['kind']}-{job['tokens']}-{job['size']}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs everything, or (on a worker) one job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds for each model and shape")
    parser.add_argument("--only", default="", metavar="TEXT", help="only jobs whose name, as in clc-14-32, has this")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the report; the default also updates README"
    )
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.job is not None:
        return work(flags.job, flags.folder)
    start, rows = time.monotonic(), []
    for job in jobs(flags.only):
        measured = run({**job, "rounds": flags.rounds})
        memory = {name: run({**job, "contender": name})["peak_mib"] for name in (PEERS if job["is_peer"] else OURS)}
        rows.append(summarise(job, measured, memory))
    report = {
        "command": f"python -m benchmarks.step_time --rounds {flags.rounds}",
        "minutes": (time.monotonic() - start) / 60,
        "machine": machine(),
        "rows": rows,
    }
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "step_time.json").write_text(json.dumps(report, indent=1) + "\n")
    (flags.out / "step_time.md").write_text(to_markdown(report))
    if flags.out == RESULTS:
        update_readme(report, RESULTS.parent.parent / "README.md")
    print(to_markdown(report))
    return None


if __name__ == "__main__":
    main()
