"""What language models memorise of their users: `python -m benchmarks.memorization --runs RUNS`.

The tables of Thakkar et al. 2021 on generated users: random phrases, the canaries, among the sentences of a few
training users; plain SGD, FedAvg, FedAvg with clipped updates and DP-FedAvg, on users as they are and on users among
whom all sentences were dealt anew (IID). A training or measurement that is complete is not run again, and one that was
interrupted goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from benchmarks.harness import results
from benchmarks.harness.results import machine
from benchmarks.harness.rows.memorization import MeasuredRun, Memorization, MemorizationRow, RowOfRun, ScaleOfRun
from benchmarks.report.render import page
from edpsgd import files
from mia.phrases import Configuration, insert_texts, make
from tasks.language.dictionary import Dictionary
from tasks.language.readers import write_jsonl
from tasks.language.user_generator import generate, generate_words
from tasks.language.user_texts import RawUsers

DELTA = 1e-4


@dataclass(frozen=True)
class Scale:
    """How large the experiment is.

    Attributes:
        users: to train on; a tenth as many are there for the test.
        sentences: of a user, on average.
        words: of the dictionary.
        size: dimension of the embeddings and width of the LSTM.
        rates: p_u and p_e of the canaries.
        per: canaries of each configuration.
        cohorts: users in a round, the small and the large one.
        rounds: of federated training.
        batches: sentences in a step of SGD, small and large.
        suffixes: random ones that a canary is ranked among.
        noise: z of DP-FedAvg.
        clip_norm: S of DP-FedAvg and of FedAvg with clipping.
    """

    users: int = 1500
    sentences: int = 10
    words: int = 300
    size: tuple[int, int] = (16, 32)
    rates: tuple[tuple[float, float], ...] = tuple((u, e) for u in (0.002, 0.006, 0.02) for e in (0.1, 0.3, 1.0))
    per: int = 10
    cohorts: tuple[int, int] = (50, 200)
    rounds: int = 100
    batches: tuple[int, int] = (8, 32)
    suffixes: int = 100_000
    noise: float = 2.0
    clip_norm: float = 0.5


REDUCED = Scale(
    users=300,
    sentences=6,
    words=60,
    size=(12, 24),
    rates=((0.025, 1.0), (0.0, 0.0)),  # a few users who say nothing else; and controls that nobody says
    per=4,
    cohorts=(20, 60),
    rounds=24,
    batches=(8, 16),
    suffixes=5000,
)


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        tables: of the paper, in which it stands.
        name: of the algorithm.
        is_iid: whether sentences were dealt anew.
        batch: sentences or users in a step.
        steps: how many.
        flags: of tasks.language_model, for the algorithm.
    """

    tables: tuple[int, ...]
    name: str
    is_iid: bool
    batch: int
    steps: int
    flags: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Where it leaves its run."""
        kind = "iid" if self.is_iid else "users"
        return f"{self.name.lower().replace(' ', '-')}-{kind}-{self.batch}-{self.steps}"


def rows(scale: Scale) -> list[Row]:
    """All trainings. "Equal rounds" is Table 1; in Table 7 all have as many passes as the large cohort makes."""
    sgd, local = ("--algorithm", "sgd", "--learning-rate", "1"), ("--batch-size", "2", "--learning-rate", "1")
    fedavg = (*local, "--server", "momentum")
    clip = (*fedavg, "--clip-norm", str(scale.clip_norm))
    private = (*clip, "--noise-multiplier", str(scale.noise))
    small, large = scale.cohorts
    epochs = scale.rounds * large / scale.users
    found = []
    for is_iid in (False, True):
        for batch in scale.batches:
            steps = round(epochs * scale.users * scale.sentences / batch)
            found.append(Row((1, 4, 7) if batch == scale.batches[0] else (1, 7), "SGD", is_iid, batch, steps, sgd))
        first = scale.batches[0]
        steps = round(epochs * scale.users * scale.sentences / first)
        slower = ("--algorithm", "sgd", "--learning-rate", "0.2", "--server", "momentum")
        adam = ("--algorithm", "sgd", "--learning-rate", "0.002", "--server", "adam")
        server = (*local, "--server", "adam", "--server-learning-rate", "0.02")
        averaging = ("--batch-size", "2", "--learning-rate", "4")
        found += [
            Row((4,), "SGD momentum", is_iid, first, steps, slower),
            Row((4,), "SGD Adam", is_iid, first, steps, adam),
            Row((1, 4), "FedAvg", is_iid, small, scale.rounds, fedavg),
            Row((4,), "FedAvg averaging", is_iid, small, scale.rounds, averaging),
            Row((4,), "FedAvg Adam", is_iid, small, scale.rounds, server),
            Row((7,), "FedAvg", is_iid, small, scale.rounds * large // small, fedavg),
            Row((1, 2, 5, 6, 7), "FedAvg", is_iid, large, scale.rounds, fedavg),
            Row((6,), "FedAvg clipped", is_iid, large, scale.rounds, clip),
            Row((2, 5, 6), "DP-FedAvg", is_iid, large, scale.rounds, private),
        ]
    return found


# -------------------------------------------------------------------- data and runs


def prepare(scale: Scale, runs: Path, seed: int = 0) -> None:
    """Training users with canaries, other users for the test, the public word list and the manifest."""
    text = json.dumps(asdict(scale))
    if (runs / "scale.json").exists():
        return _check_scale(json.loads((runs / "scale.json").read_text(encoding="utf-8")), scale, runs)
    runs.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary(generate_words(scale.words))
    everybody = generate(scale.users + scale.users // 10, seed, scale.sentences, scale.words)
    train = RawUsers(everybody.names[: scale.users], everybody.texts[: scale.users])
    test = RawUsers(everybody.names[scale.users :], everybody.texts[scale.users :])
    rates = [Configuration(users, examples) for users, examples in scale.rates]
    changed, manifest = insert_texts(train, make(len(dictionary), rates, scale.per, seed=seed), dictionary, seed)
    write_jsonl(runs / "users.jsonl", changed)
    write_jsonl(runs / "test.jsonl", test)
    dictionary.save(runs / "dictionary.txt")
    manifest.save(runs / "canaries.json", dictionary)
    (runs / "scale.json").write_text(text, encoding="utf-8")


def _check_scale(known: object, scale: Scale, folder: Path) -> None:
    if known != json.loads(json.dumps(asdict(scale))):
        raise ValueError(f"{folder} holds an experiment of another scale: name another folder")


def run(row: Row, scale: Scale, runs: Path) -> None:
    """Trains and measures, unless it was done."""
    folder = runs / row.folder
    if not is_complete(folder):
        is_begun = any((folder / "checkpoints").glob("step-*"))
        if not is_begun:
            shutil.rmtree(folder, ignore_errors=True)
        flags = ["--resume", str(folder)] if is_begun else [*_flags(row, scale, runs), "--output", str(folder)]
        _command(folder, "tasks.language_model", *flags)
    if not (folder / "exposure.json").exists():
        about = ["--canaries", str(runs / "canaries.json"), "--suffixes", str(scale.suffixes)]
        _command(folder, "mia.secret_sharer", "measure", "--run", str(folder), *about)
    print(f"{row.folder}: done", flush=True)


def is_complete(folder: Path) -> bool:
    """Whether the training has ended."""
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and '"test_accuracy"' in files.read_text(metrics, files.LARGE)


def _flags(row: Row, scale: Scale, runs: Path) -> list[str]:
    size = "--batch-size" if row.name.startswith("SGD") else "--cohort"
    settings = {
        "--task": "jsonl",
        "--data": runs / "users.jsonl",
        "--test-data": runs / "test.jsonl",
        "--dictionary": runs / "dictionary.txt",
        "--dimension": scale.size[0],
        "--hidden": scale.size[1],
        size: row.batch,
        "--rounds": row.steps,
        "--checkpoint-every": max(1, row.steps // 4),
        "--delta": DELTA,
        "--seed": 0,
    }
    given = [str(part) for pair in settings.items() for part in pair]
    return [*given, *row.flags, "--no-tensorboard", *(["--iid"] if row.is_iid else [])]


def _command(folder: Path, *arguments: str) -> None:
    log = folder.with_name(f"{folder.name}.log")
    with open(log, "a", encoding="utf-8") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *arguments], stdout=file, stderr=file, env=environment, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{folder.name} failed: see {log}")


# -------------------------------------------------------------------- the tables


def collect(all_rows: Iterable[Row], scale: Scale, runs: Path) -> Memorization:
    """What the complete runs have found, JSON-ready."""
    found: list[MemorizationRow] = []
    for row in all_rows:
        folder = runs / row.folder
        if is_complete(folder) and (folder / "exposure.json").exists():
            found.append({**cast(RowOfRun, asdict(row)), **_figures(folder)})
    scale_of_run = cast(ScaleOfRun, asdict(scale))
    return {"machine": machine(), "scale": scale_of_run, "delta": DELTA, "rows": found}


def _row(found: Mapping[str, Any]) -> Row:
    return Row(**{field.name: found[field.name] for field in fields(Row)})


def _figures(folder: Path) -> MeasuredRun:
    last = files.parse_json(files.read_text(folder / "metrics.jsonl", files.LARGE).splitlines()[-1])
    measured = files.read_json(folder / "exposure.json")["summary"]
    found: MeasuredRun = {
        "test_accuracy": last["test_accuracy"],
        "test_perplexity": last["test_perplexity"],
        "seconds": last["seconds"],
        "memorised": measured,
    }
    if "epsilon" in last:
        found["epsilon"] = last["epsilon"]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = results.reducible("memorization", __doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/memorization"), metavar="DIR", help="where runs go")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="trainings at a time")
    results.add_choice(parser, "names of runs")
    flags = parser.parse_args(arguments)
    if flags.page:
        found = results.load("memorization", flags.out)
        return results.save(flags.out, "memorization", found, page("memorization", found))
    scale = REDUCED if flags.reduced else Scale()
    if (flags.out / "memorization.json").exists():
        _check_scale(results.load("memorization", flags.out)["scale"], scale, flags.out)
    prepare(scale, flags.runs)
    all_rows = [row for row in rows(scale) if not row.is_iid and row.tables[0] <= 2] if flags.reduced else rows(scale)
    names = results.chosen(flags, [row.folder for row in all_rows])
    chosen = [row for row in all_rows if row.folder in names]
    is_whole = len(chosen) == len(all_rows) and not any((flags.runs / row.folder).exists() for row in chosen)
    start = time.monotonic()
    with ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(lambda row: run(row, scale, flags.runs), sorted(chosen, key=lambda row: -row.batch)))
    clock = time.monotonic() - start
    order = {row.folder: number for number, row in enumerate(rows(scale))}
    collected = collect(rows(scale), scale, flags.runs)
    measured = {"command": results.command("memorization", flags), "seed": 0, **collected}
    found = results.merged(flags.out, "memorization", measured, "rows", lambda row: order.get(_row(row).folder, -1))
    found["minutes"] = (clock if is_whole else sum(row["seconds"] for row in found["rows"])) / 60
    return results.save(flags.out, "memorization", found, page("memorization", found))


if __name__ == "__main__":
    main()
