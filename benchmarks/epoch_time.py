"""Time of an epoch, the paper's Table 2: SGD, eDP-SGD, smaller units, vanilla DP-SGD, and Opacus where it can run.

    python -m benchmarks.epoch_time --data DIR [--only clc]

Two Horovod workers with one thread each, 32 utterances per worker and step, real and generated corpora. All contenders
of a model live in one process and take turns on every batch of the epoch, so that a slow moment of the machine hits
them alike. Slow contenders make some steps only, spread over the epoch, and their epoch is extrapolated; so are the
epochs over a million utterances, and those of peers. The epoch over a hundred thousand is measured in parts, with
smaller units in some of its steps: until all of them are there, it is extrapolated too. What is in the file of figures
is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import edpsgd
from benchmarks import cost_model, on_workers, results
from benchmarks.contenders import CHANGES, NAMES, PEERS, SLOW, Batch, Contender, Sizes, make, take_turns
from benchmarks.step_time import peak, step_parts
from models.bert import BertInputs
from tasks import run
from tasks.config import Config
from tasks.data import load
from tasks.examples import Examples
from tasks.planning import make_batches

BATCH, FEW, WORKERS, WARM_UP, SLOW_STEPS = 32, 8, 2, 3, 6  # few utterances in a step of the reduced version
MANY, PARTS = 100_000, 4  # utterances whose epoch is measured in parts
PART_WARM_UP, SAMPLE = 8, 120  # no part is the first of a training; of smaller units, some steps of the epoch
PEER_STEPS = 12
Times = dict[tuple[int, int], float]  # by pass and step
MODELS = {"clc": "CLC", "bert": "BERT"}
OURS = ("sgd", "edp", "groups", "example", "loop")
CORPORA = {"atis": "ATIS", "snips": "SNIPS", "nlu-eval": "NLU-EVAL"}
GENERATED = (10_000, MANY)
PAPER = {  # over SGD: vanilla DP-SGD, eDP-SGD; Table 2 of Dupuy et al. 2021
    ("clc", "ATIS"): (2.1, 1.04),
    ("clc", "SNIPS"): (5.1, 1.01),
    ("clc", "NLU-EVAL"): (7.3, 1.03),
    ("bert", "ATIS"): (13.0, 1.29),
    ("bert", "SNIPS"): (22.8, 1.52),
    ("bert", "NLU-EVAL"): (29.2, 1.62),
}


# -------------------------------------------------------------------- what the workers run


class Epoch:
    """The training set of a corpus in batches of one worker, and what a model for it must know."""

    def __init__(self, model: str, task: str, examples: int, data: str | None, batch: int) -> None:
        config = Config(
            task=task, data=data, model=model, split="random", vocabulary="training-set", batch_size=batch,
            examples=examples, private="off", seed=0,
        )  # fmt: skip
        self._config, self._collective = config, edpsgd.collectives.resolve("horovod")
        self.size = batch
        self._load(config, is_whole=task == "generated")
        self._drawn: dict[int, list[list[int]]] = {}
        self.utterances, self.steps = len(self._train), self._number(0)

    def _load(self, config: Config, is_whole: bool) -> None:
        read = load(config, None, 0)
        rows = np.arange(len(read.corpus)) if is_whole else read.rows.train
        parts = run.build(config, read.corpus, rows)
        is_bert = isinstance(parts.inputs, BertInputs)
        words = len(parts.inputs.tokenizer) if is_bert else len(parts.inputs.vectors.words) + 1
        self.sizes = Sizes(words, len(parts.labels.intents), len(parts.labels.tags))
        self._train = Examples(read.corpus, rows, parts.inputs.table(read.corpus.words), parts.labels, self.size)

    def _number(self, turn: int) -> int:
        """Draws the batches of a pass; of how many steps all workers have utterances."""
        config = replace(self._config, seed=turn)
        self._drawn[turn] = [rows for rows in make_batches(config, len(self._train), self._collective) if rows]
        return min(self._collective.gather(len(self._drawn[turn])))

    def batch(self, step: int, turn: int = 0, is_single: bool = True) -> tuple[Batch, list[Batch]]:
        """The utterances of a step, longest first; together and, if they are wanted, one by one."""
        if turn not in self._drawn:
            self._number(turn)
        [rows] = self._train.sorted_parts(self._drawn[turn][step])
        return self._train.batch(rows), [self._train.batch([row]) for row in rows] if is_single else []


def measure(
    model: str, task: str, examples: int, data: str | None, batch: int, folder: Path, what: str, **job: Any
) -> Any:
    """On one worker: what the job asks for."""
    epoch = Epoch(model, task, examples, data, batch)
    return {"times": _times, "memory": _memory, "parts": _parts}[what](model, epoch, folder, **job)


def _times(
    model: str, epoch: Epoch, folder: Path, is_peer: bool, passes: int, most: int | None, part: int, parts: int
) -> dict[str, Any]:
    """Seconds of every step that a contender made; each pass is the first epoch of a training."""
    names = PEERS if is_peer else OURS
    steps = spread(epoch.steps, most or epoch.steps)
    steps = steps[part * len(steps) // parts : (part + 1) * len(steps) // parts]
    seldom = {**dict.fromkeys(SLOW, SLOW_STEPS), **(dict.fromkeys(("groups", "example"), SAMPLE) if parts > 1 else {})}
    few = {name: {steps[i] for i in spread(len(steps), math.ceil(n / parts))} for name, n in seldom.items()}
    times: dict[str, Times] = {name: {} for name in names}
    for turn in range(passes):
        (folder / str(turn)).mkdir(exist_ok=True)
        contenders = {name: make(name, model, is_peer, epoch.sizes, epoch.size, folder / str(turn)) for name in names}
        for number in range(WARM_UP if parts == 1 else PART_WARM_UP):
            take_turns(contenders, number, *epoch.batch(number % epoch.steps), names)
        for number, step in enumerate(steps):
            chosen = [name for name in names if name not in few or (step in few[name] and turn == 0)]
            batch = epoch.batch(step, turn, is_single="loop" in chosen)
            for name, seconds in take_turns(contenders, number, *batch, chosen).items():
                times[name][turn, step] = seconds
    return {
        "parameters": sum(p.numel() for p in contenders["sgd"].model.parameters()),
        "utterances": epoch.utterances,
        "steps": epoch.steps,
        "times": {name: in_portions(own, times["sgd"]) for name, own in times.items()},
    }


def in_portions(own: Times, sgd: Times) -> dict[str, Any]:
    """Mean seconds of a step and ratio to SGD on the same steps, for each pass; of a single one for its thirds.

    Example:
        >>> in_portions({(0, 3): 2.0, (1, 3): 6.0}, {(0, 3): 1.0, (1, 3): 2.0, (1, 4): 9.0})
        {'steps': 1, 'passes': 2, 'step_seconds': [2.0, 6.0], 'ratios': [2.0, 3.0]}
    """
    passes = [[key for key in own if key[0] == turn] for turn in sorted({turn for turn, _ in own})]
    portions = passes
    if len(passes) == 1 and len(passes[0]) >= 3:
        third = len(passes[0]) / 3
        portions = [passes[0][round(i * third) : round((i + 1) * third)] for i in range(3)]
    seconds = [statistics.fmean(own[key] for key in portion) for portion in portions]
    plain = [statistics.fmean(sgd[key] for key in portion) for portion in portions]
    return {
        "steps": len(passes[0]),
        "passes": len(passes),
        "step_seconds": seconds,
        "ratios": [one / other for one, other in zip(seconds, plain, strict=True)],
    }


def _memory(model: str, epoch: Epoch, folder: Path, is_peer: bool, contender: str) -> dict[str, float]:
    chosen = make(contender, model, is_peer, epoch.sizes, epoch.size, folder)
    return peak(chosen, contender, *epoch.batch(0))


def _parts(model: str, epoch: Epoch, folder: Path, rounds: int) -> dict[str, Any]:
    """For the cost model: milliseconds of a step of SGD and of eDP-SGD, and of the parts of the latter."""
    import horovod.torch as hvd

    names = ("sgd", "edp")
    contenders: dict[str, Contender] = {
        name: make(name, model, False, epoch.sizes, epoch.size, folder) for name in names
    }
    whole, parts = [], []
    for number in range(WARM_UP + rounds):
        batch, examples = epoch.batch(number % epoch.steps, is_single=False)
        whole.append(take_turns(contenders, number, batch, examples, names))
        hvd.barrier()
        parts.append(step_parts(contenders["edp"], batch, examples))

    def middle(found: list[dict[str, float]]) -> dict[str, float]:
        return {key: 1e3 * statistics.median(one.get(key, 0.0) for one in found[WARM_UP:]) for key in found[-1]}

    size = sum(p.numel() for p in contenders["sgd"].model.parameters())
    return {"parameters": size, "whole_ms": middle(whole), "parts_ms": middle(parts)}


def spread(steps: int, most: int) -> list[int]:
    """So many of an epoch's steps, evenly, or all of them.

    Example:
        >>> spread(10, 3), spread(2, 3)
        ([1, 5, 8], [0, 1])
    """
    number = min(steps, most)
    return [(2 * i + 1) * steps // (2 * number) for i in range(number)]


# -------------------------------------------------------------------- from steps to epochs


def summarise(
    model: str, corpus: str, is_peer: bool, found: dict[str, Any], steps: int | None = None
) -> dict[str, Any]:
    """A row of the table; ``steps`` makes it one of a larger corpus whose steps cost the same."""
    steps = steps or found["steps"]
    plain = _epoch(found["times"]["sgd"], steps)[0]
    contenders = {}
    for name, one in found["times"].items():
        is_whole = one["steps"] == steps
        seconds, ratio = _epoch(one, steps)
        epochs = [plain * ratio / seconds * steps * part for part in one["step_seconds"]]
        contenders[name] = {
            "seconds": plain * ratio,  # as on the steps that SGD made
            "spread": [min(epochs), max(epochs)],
            "ratio": ratio,
            "ratio_spread": [min(one["ratios"]), max(one["ratios"])],
            "measured_steps": one["steps"],
            "repetitions": one["passes"],
            "is_extrapolated": not is_whole,
        }
    paper = PAPER.get((model, corpus)) if not is_peer else None
    return {
        "model": model, "corpus": corpus, "is_peer": is_peer, "changes": CHANGES[model] if is_peer else "",
        "parameters": found["parameters"], "utterances": found["utterances"], "steps": steps,
        "processor": found["machine"]["processor"],
        "paper": None if paper is None else dict(zip(("dp_sgd", "edp"), paper, strict=True)), "contenders": contenders,
    }  # fmt: skip


def _epoch(one: dict[str, Any], steps: int) -> tuple[float, float]:
    """Seconds and ratio of a pass: the median of passes, or the whole of a single one, whose thirds are known."""
    plain = [own / ratio for own, ratio in zip(one["step_seconds"], one["ratios"], strict=True)]
    if one["passes"] > 1:
        return steps * statistics.median(one["step_seconds"]), statistics.median(one["ratios"])
    seconds = statistics.fmean(one["step_seconds"])
    return steps * seconds, seconds / statistics.fmean(plain)


def whole_epochs(pieces: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts parts of one epoch together; each is a portion of it. They take the place of a sample of its steps."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, piece in pieces.items():
        if not any(other.startswith(f"{name}, part ") for other in pieces):
            rows.setdefault(json.dumps(piece["about"]), []).append(piece)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in rows.values()]


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = {}
    for name in parts[0]["times"]:
        own = [part["times"][name] for part in parts]
        seconds, ratios = zip(*(_epoch(one, 1) for one in own), strict=True)
        steps = sum(one["steps"] for one in own)
        times[name] = {"steps": steps, "passes": 1, "step_seconds": list(seconds), "ratios": list(ratios)}
    processors = ", ".join(dict.fromkeys(part["machine"]["processor"] for part in parts))
    return {**parts[0], "times": times, "machine": {"processor": processors}}


def figures(pieces: dict[str, dict[str, Any]], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Tables and cost model, as far as the wanted pieces are measured; ``wanted`` has their settings."""
    order = {name: number for number, name in enumerate(wanted)}
    pieces = dict(sorted(pieces.items(), key=lambda item: order.get(item[0], len(order))))
    timed = whole_epochs({name: piece for name, piece in pieces.items() if "times" in piece})
    rows = [summarise(**piece["about"], found=piece) for piece in timed]
    for piece in timed:
        if piece["utterances"] == MANY:
            million = {**piece["about"], "corpus": _power(10 * MANY)}
            steps = math.ceil(10 * MANY / (BATCH * WORKERS))
            rows.append({**summarise(**million, found=piece, steps=steps), "utterances": 10 * MANY})
    memory = [{**piece["about"], "peak_mib": piece["peak_mib"]} for piece in pieces.values() if "peak_mib" in piece]
    plain = {(one["model"], one["is_peer"]): one["peak_mib"] for one in memory if one["contender"] == "sgd"}
    for one in memory:
        one["ratio"] = one["peak_mib"] / plain.get((one["model"], one["is_peer"]), one["peak_mib"])
    parts = {model: _of_workers(pieces, model) for model in MODELS}
    missing = results.missing(pieces, wanted)
    return {
        "is_complete": not missing,
        "missing": missing,
        "seed": 0,
        "workers": WORKERS,
        "batch": next((settings["batch"] for settings in wanted.values()), BATCH),
        "names": NAMES,
        "rows": sorted(rows, key=lambda row: (row["is_peer"], row["model"] != "clc", row["utterances"])),
        "memory": memory,
        "cost_model": {model: cost_model.fit(found) for model, found in parts.items() if {1, 2, 3} <= found.keys()},
    }


def _of_workers(pieces: dict[str, dict[str, Any]], model: str) -> dict[int, dict[str, Any]]:
    found = [piece for piece in pieces.values() if "whole_ms" in piece and piece["about"]["model"] == model]
    return {piece["about"]["workers"]: piece for piece in found}


def _power(number: int) -> str:
    power = round(np.log10(number))
    return f"generated 10^{power}" if 10**power == number else f"generated {number}"


# -------------------------------------------------------------------- the page


def page(found: dict[str, Any]) -> str:
    """The figures, to read."""
    lines = ["# Time of an epoch", "", results.made(found), "", _ABOUT.format(batch=found["batch"]), ""]
    if found["missing"]:
        lines += [f"Not complete, not measured with this code: {'; '.join(found['missing'])}.", ""]
    lines += epoch_table([row for row in found["rows"] if not row["is_peer"]])
    peers = [row for row in found["rows"] if row["is_peer"]]
    if peers:
        changes = "; ".join(f"{MODELS[model]}: {text}" for model, text in CHANGES.items())
        lines += [
            "",
            "## Opacus, on models that it can train",
            "",
            f"{changes}. {_ABOUT_PEERS}",
            "",
        ]
        lines += epoch_table(peers)
    if found["memory"]:
        rows = [
            (MODELS[one["model"]] + (", as Opacus can train it" if one["is_peer"] else ""), NAMES[one["contender"]],
             f"{one['peak_mib']:.0f}", f"{one['ratio']:.2f}")
            for one in found["memory"]
        ]  # fmt: skip
        lines += ["", "## Peak memory of a worker", ""]
        lines += results.table(("model", "training", "MiB", "over SGD"), rows)
    for model, fitted in found["cost_model"].items():
        lines += [
            "",
            f"## Prediction for more workers: {MODELS[model]}",
            "",
            fitted["text"],
            "",
            *cost_model.tables(fitted),
        ]
    return "\n".join(lines) + "\n"


_ABOUT = (
    f"{WORKERS} Horovod workers, one thread each, {{batch}} utterances per worker and step, Adam, ledger on disk; of "
    "the real corpora the 45 % that are for training. Assembling batches is not in the times. Seconds of an epoch, and "
    "in brackets how many times those of SGD, with the lowest and the highest: of ATIS the median of three passes, "
    "each the first epoch of another training, else one pass and its thirds, or its parts where it was measured in "
    "several, each a process of its own. ~: extrapolated from so many steps. Single examples and micro-batches in one "
    f"pass compare some batches with autograd, most of them at the beginning: after {WARM_UP} steps that are not "
    f"counted, or {PART_WARM_UP} in parts, these checks are in the figures. The paper's are from eight GPUs. The "
    "layers of CLC and BERT have the sizes of the paper, their tables the words of the training set (BERT: its own "
    "pieces), which are learned; both end in a CRF. Memory is that of a process with Python, libraries and data."
)
_ABOUT_PEERS = (
    "SGD and ours train torch's LSTM, so that Opacus's figures for CLC hold the cost of its own. Opacus knows no "
    "Horovod: each worker adds its share of the noise, and Horovod averages."
)


def epoch_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Seconds and ratios, a line for each model and corpus."""
    names = [name for name in NAMES if any(name in row["contenders"] for row in rows)]
    head = ("model", "corpus", "steps", *(NAMES[name] for name in names), "paper: DP-SGD, eDP-SGD", "processor")
    body = []
    for row in rows:
        cells = [_cell(name, row["contenders"][name]) if name in row["contenders"] else "–" for name in names]
        paper = f"{row['paper']['dp_sgd']:g}, {row['paper']['edp']:g}" if row["paper"] else "–"
        body.append((MODELS[row["model"]], row["corpus"], str(row["steps"]), *cells, paper, row["processor"]))
    return results.table(head, body)


def _cell(name: str, one: dict[str, Any]) -> str:
    sign, steps = _sign(one), f", {one['measured_steps']} steps" if one["is_extrapolated"] else ""
    if name == "sgd":
        return f"{sign}{one['seconds']:.1f} s"
    low, high = one["ratio_spread"]
    return f"{sign}{one['seconds']:.1f} s ({one['ratio']:.2f}; {low:.2f} to {high:.2f}{steps})"


def _sign(one: dict[str, Any]) -> str:
    return "~" if one["is_extrapolated"] else ""


def readme_table(found: dict[str, Any]) -> str:
    """Ratios over SGD, for the README; a million utterances have those of a tenth."""
    names = [name for name in NAMES if name != "sgd" and name in OURS]
    rows = [row for row in found["rows"] if not row["is_peer"] and row["utterances"] <= MANY]
    usual = Counter(row["processor"] for row in rows).most_common(1)[0][0]
    known = "" if "(" in usual else ", with instructions that were not recorded"
    others = ", ".join(dict.fromkeys(row["processor"] for row in rows if row["processor"] != usual))
    head = ("an epoch over SGD's", *(NAMES[name] for name in names), "the paper's eDP-SGD")
    body = [
        (
            f"{MODELS[row['model']]}, {row['corpus']}{'' if row['processor'] == usual else ' *'}",
            *(_sign(row["contenders"][name]) + f"{row['contenders'][name]['ratio']:.2f}" for name in names),
            f"{row['paper']['edp']:.2f}" if row["paper"] else "–",
        )
        for row in rows
    ]
    note = ["", f"\\* on another processor: {others}; the others on {usual}{known}"] if others else []
    return "\n".join([*results.table(head, body), *note])


# -------------------------------------------------------------------- the command


def jobs(data: Path | None, is_reduced: bool) -> dict[str, tuple[dict[str, Any], int, dict[str, Any]]]:
    """By name: a job, its workers, and what its piece says about itself."""
    sizes = (100,) if is_reduced else GENERATED
    corpora = [] if data is None or is_reduced else [(task, 0, str(data), name) for task, name in CORPORA.items()]
    corpora += [("generated", size, None, _power(size)) for size in sizes]
    found: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {}
    batch = {"batch": FEW if is_reduced else BATCH}
    for model in MODELS:
        for task, size, folder, name in corpora:
            where = {"model": model, "task": task, "examples": max(1, size), "data": folder, **batch}
            for is_peer in (False, True) if name == corpora[0][3] and not is_reduced else (False,):
                passes = 3 if task == "atis" and not is_peer else 1
                most, parts = PEER_STEPS if is_peer else None, PARTS if size == MANY else 1
                job = {**where, "what": "times", "is_peer": is_peer, "passes": passes, "most": most, "parts": parts}
                about = {"model": model, "corpus": name, "is_peer": is_peer}
                for part in range(parts):
                    which = ", peers" if is_peer else f", part {part + 1} of {parts}" if parts > 1 else ""
                    found[f"{model}, {name}{which}"] = {**job, "part": part}, WORKERS, about
        if model == "clc" or not is_reduced:
            where = {"model": model, "task": "generated", "examples": min(sizes), "data": None, **batch}
            found |= _other_jobs(model, where, is_reduced)
    return found


def _other_jobs(model: str, where: dict[str, Any], is_reduced: bool) -> dict[str, tuple[dict[str, Any], int, Any]]:
    """Memory and the parts of a step, on the smallest generated corpus."""
    found: dict[str, tuple[dict[str, Any], int, Any]] = {}
    for is_peer, names in ((False, OURS[:2]),) if is_reduced else ((False, OURS), (True, PEERS)):
        for name in names:
            about = {"model": model, "is_peer": is_peer, "contender": name}
            job = {**where, "what": "memory", "is_peer": is_peer, "contender": name}
            found[f"{model}, memory of {name}{', peers' if is_peer else ''}"] = job, WORKERS, about
    for number in (1, 2, 3):
        job = {**where, "what": "parts", "rounds": 3 if is_reduced else 60}
        found[f"{model}, parts on {number} workers"] = job, number, {"model": model, "workers": number}
    return found


def measured(job: dict[str, Any], workers: int, about: dict[str, Any]) -> dict[str, Any]:
    """A piece of the figures."""
    return {**on_workers.run("benchmarks.epoch_time", job, workers), "about": about}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs everything, or (on a worker) one job."""
    parser = results.reducible("epoch_time", __doc__)
    results.add_anew(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder of the real corpora")
    results.add_choice(parser, "'clc, ATIS', 'bert, parts on 2 workers', ...")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.job is not None:
        return on_workers.serve(measure, flags.job, flags.folder)
    if flags.data is None and not flags.reduced:
        parser.error("--data DIR, the folder of the corpora, is missing")
    command = f"python -m benchmarks.epoch_time {'--reduced' if flags.reduced else '--data DIR'}"
    works = jobs(flags.data, flags.reduced)
    wanted = {name: {**job, "data": None} for name, (job, *_) in works.items()}
    kept = results.Pieces(flags.out, "epoch_time", partial(figures, wanted=wanted), page, command, flags.anew)
    for name in results.chosen(flags, works):
        kept.get(name, partial(measured, *works[name]), wanted[name])
    kept.write()
    return None


if __name__ == "__main__":
    main()
