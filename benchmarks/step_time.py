"""Time and memory of a training step: Horovod's SGD, eDP-SGD with both noise placements, and vanilla DP-SGD.

    python -m benchmarks.step_time [--rounds 30] [--out benchmarks/results]

Two Horovod workers with one thread each, Adam, 32 sequences per worker. All contenders of a model take turns in one
process, so that a slow moment of the machine hits them alike; a ratio compares two steps of the same round. Peak memory
is taken in processes of their own.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchcrf import CRF
from transformers import BertConfig, BertModel

import edpsgd
from edpsgd import clipping, gradients

BATCH, WORKERS, TAGS, INTENTS = 32, 2, 20, 10
TOKENS = (14, 30)
RESULTS = Path(__file__).parent / "results"
CONTENDERS = ("sgd", "edp_sharded", "edp_per_worker", "dp_sgd")
NAMES = {
    "sgd": "SGD (`hvd.DistributedOptimizer`)",
    "edp_sharded": "eDP-SGD, sharded noise (default)",
    "edp_per_worker": "eDP-SGD, per-worker noise",
    "dp_sgd": "vanilla DP-SGD (loop over examples)",
}


class Bert(nn.Module):
    """4 layers, 312 wide, 12 heads, with linear intent and slot heads."""

    vocabulary = 30522

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 312, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 1200}
        self.bert = BertModel(BertConfig(vocab_size=self.vocabulary, **sizes))
        self.intent = nn.Linear(312, INTENTS)
        self.slots = nn.Linear(312, TAGS)

    def forward(self, words: torch.Tensor, tags: torch.Tensor, intents: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        output = self.bert(input_ids=words)
        slot_loss = nn.functional.cross_entropy(self.slots(output.last_hidden_state).flatten(0, 1), tags.flatten())
        return slot_loss + nn.functional.cross_entropy(self.intent(output.pooler_output), intents)


class BiLstmCrf(nn.Module):
    """Word embeddings, 2 bidirectional LSTM layers of 384, a linear intent head and a CRF for the slots."""

    vocabulary = 5000

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.vocabulary, 300)
        self.lstm = nn.LSTM(300, 384, num_layers=2, bidirectional=True, batch_first=True)
        self.intent = nn.Linear(768, INTENTS)
        self.slots = nn.Linear(768, TAGS)
        self.crf = CRF(TAGS, batch_first=True)

    def forward(self, words: torch.Tensor, tags: torch.Tensor, intents: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        states, _ = self.lstm(self.embed(words))
        slot_loss = -self.crf(self.slots(states), tags, reduction="mean")
        return slot_loss + nn.functional.cross_entropy(self.intent(states.mean(1)), intents)


MODELS: dict[str, type[Bert] | type[BiLstmCrf]] = {"bert": Bert, "bilstm_crf": BiLstmCrf}


# -------------------------------------------------------------------- what the two workers run


def make(contender: str, kind: str, folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer; the private ones keep their ledger on disk."""
    import horovod.torch as hvd

    torch.manual_seed(0)
    model = MODELS[kind]()
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    if contender == "sgd":
        return model, hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())
    unit = {"unit": "example", "divisor": BATCH * WORKERS} if contender == "dp_sgd" else {"unit": "micro_batch"}
    return model, edpsgd.PrivateOptimizer(
        adam,
        model.named_parameters(),
        clip_norm=1.0,
        noise_multiplier=0.8,
        noise_decay=edpsgd.LinearDecay(0.05),
        noise_placement="per_worker" if contender == "edp_per_worker" else "sharded",
        ledger=folder / f"{kind}-{contender}.jsonl",
        **unit,
    )


def make_batch(kind: str, tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random words, tags and intents."""
    generator = torch.Generator().manual_seed(rank)
    words = torch.randint(0, MODELS[kind].vocabulary, (BATCH, tokens), generator=generator)
    tags = torch.randint(0, TAGS, (BATCH, tokens), generator=generator)
    return words, tags, torch.randint(0, INTENTS, (BATCH,), generator=generator)


def train_step(contender: str, model: nn.Module, optimizer: Any, batch: tuple[torch.Tensor, ...]) -> None:
    """One step; vanilla DP-SGD clips the gradient of every example."""
    optimizer.zero_grad()
    if contender == "dp_sgd":
        for index in range(BATCH):
            model(*(part[index : index + 1] for part in batch)).backward()
            optimizer.accumulate()
    else:
        model(*batch).backward()
    optimizer.step()


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
        (type(optimizer), "step", "step"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    try:
        for (owner, name, part), original in zip(places, originals, strict=True):
            setattr(owner, name, timed(part, original))
        yield spent
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def measure_time(kind: str, tokens: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Interleaved steps of all contenders, in seconds, and where the time of eDP-SGD goes."""
    import horovod.torch as hvd

    pairs = {contender: make(contender, kind, folder) for contender in CONTENDERS}
    batch = make_batch(kind, tokens, hvd.rank())
    times: dict[str, list[float | None]] = {contender: [] for contender in CONTENDERS}
    warm_up, slow_rounds = 2, 4
    for number in range(warm_up + rounds):
        order = [CONTENDERS[(number + shift) % len(CONTENDERS)] for shift in range(len(CONTENDERS))]
        for contender in order:
            if contender == "dp_sgd" and number >= warm_up + slow_rounds:
                times[contender].append(None)
                continue
            hvd.barrier()
            start = time.perf_counter()
            train_step(contender, *pairs[contender], batch)
            times[contender].append(time.perf_counter() - start)
    parts: dict[str, list[dict[str, float]]] = {}
    for contender in ("edp_sharded", "edp_per_worker"):
        model, optimizer = pairs[contender]
        for _ in range(8):
            with stopwatch(optimizer) as spent:  # type: ignore[arg-type]
                start = time.perf_counter()
                train_step(contender, model, optimizer, batch)
            spent["whole"] = time.perf_counter() - start
            parts.setdefault(contender, []).append(spent)
    return {
        "parameters": sum(p.numel() for p in pairs["sgd"][0].parameters()),
        "times": {contender: values[warm_up:] for contender, values in times.items()},
        "parts": {c: {k: statistics.median(s[k] for s in runs) for k in runs[0]} for c, runs in parts.items()},
    }


def measure_memory(kind: str, tokens: int, contender: str, folder: Path) -> dict[str, float]:
    """Peak resident memory of a process that does nothing else, in MiB."""
    import horovod.torch as hvd

    model, optimizer = make(contender, kind, folder)
    batch = make_batch(kind, tokens, hvd.rank())
    for _ in range(3 if contender != "dp_sgd" else 2):
        train_step(contender, model, optimizer, batch)
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


def summarise(kind: str, tokens: int, measured: dict[str, Any], memory: dict[str, float]) -> dict[str, Any]:
    """Medians, ratios within rounds, and the parts of a step as shares of it."""
    times = measured["times"]
    contenders = {}
    for contender in CONTENDERS:
        pairs = [(own, sgd) for own, sgd in zip(times[contender], times["sgd"], strict=True) if own is not None]
        contenders[contender] = {
            "milliseconds": [1e3 * q for q in quartiles([own for own, _ in pairs])],
            "ratio_to_sgd": quartiles([own / sgd for own, sgd in pairs]),
            "steps": len(pairs),
            "peak_mib": memory[contender],
        }
    return {
        "model": kind,
        "tokens": tokens,
        "parameters": measured["parameters"],
        "contenders": contenders,
        "parts_ms": {c: {k: 1e3 * v for k, v in parts.items()} for c, parts in measured["parts"].items()},
    }


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import horovod
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
        f"transformers {about['transformers']}.",
        "",
        f"{WORKERS} workers with one thread each, {BATCH} sequences per worker, Adam, the ledger on disk. Medians, "
        "quartiles in brackets; ratios compare steps of the same round.",
    ]
    for row in report["rows"]:
        lines += ["", f"## {row['model']}, {row['parameters'] / 1e6:.1f} M parameters, {row['tokens']} tokens", ""]
        lines += ["| | ms per step | over SGD | peak memory, MiB |", "|---|---|---|---|"]
        for contender, figures in row["contenders"].items():
            low, mid, high = figures["milliseconds"]
            ratio = "{1:.3f} ({0:.3f} to {2:.3f})".format(*figures["ratio_to_sgd"])
            lines.append(
                f"| {NAMES[contender]} | {mid:.0f} ({low:.0f} to {high:.0f}) | {ratio} | {figures['peak_mib']:.0f} |"
            )
        lines += ["", "| of a private step, ms | norm | scale | noise | ledger | wire | Adam | all |", "|---" * 8 + "|"]
        for contender, parts in row["parts_ms"].items():
            cells = [f"{parts[k]:.2f}" for k in ("norm", "scale", "noise", "ledger", "wire", "adam", "whole")]
            lines.append(f"| {NAMES[contender]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def readme_table(report: dict[str, Any]) -> str:
    """The ratios, for the README."""
    titles = {"bert": "BERT", "bilstm_crf": "BiLSTM-CRF"}
    heads = [f"{titles[r['model']]} {r['parameters'] / 1e6:.0f} M, {r['tokens']} tokens" for r in report["rows"]]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for contender in CONTENDERS[1:]:
        ratios = [f"{row['contenders'][contender]['ratio_to_sgd'][1]:.2f}" for row in report["rows"]]
        lines.append(f"| {NAMES[contender]} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs everything, or (on a worker) one job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds for each model and length")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        return work(arguments.job, arguments.folder)
    start, rows = time.monotonic(), []
    for kind in MODELS:
        for tokens in TOKENS:
            measured = run({"kind": kind, "tokens": tokens, "rounds": arguments.rounds})
            memory = {c: run({"kind": kind, "tokens": tokens, "contender": c})["peak_mib"] for c in CONTENDERS}
            rows.append(summarise(kind, tokens, measured, memory))
    report = {
        "command": f"python -m benchmarks.step_time --rounds {arguments.rounds}",
        "minutes": (time.monotonic() - start) / 60,
        "machine": machine(),
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "step_time.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "step_time.md").write_text(to_markdown(report))
    print(to_markdown(report))
    return None


if __name__ == "__main__":
    main()
