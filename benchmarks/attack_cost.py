"""What the features of an attack cost beside plain prediction: `python -m benchmarks.attack_cost`.

Forward pass and Viterbi against forward pass and marginals of the CRF, with models of full size on generated
utterances. Both are measured in turn, on parts of the data, and the figure is the ratio of the sums.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.harness import results
from benchmarks.harness.results import machine
from benchmarks.harness.rows.attack_cost import AttackCost, AttackCostRow
from benchmarks.report.render import page
from mia.views import BATCH, view
from models.heads import Prediction
from tasks.nlu import generator as generate
from tasks.nlu import new_model as run
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import OUTSIDE, Corpus, Rows
from tasks.nlu.example_batches import Examples
from tasks.nlu.labels import Labels
from tasks.nlu.run_folder import Parts

SLOTS = (0, 83)  # those of the generator, and as many as ATIS has
PART = 2000  # utterances between turns


def measure(model: str, slots: int, examples: int) -> AttackCostRow:
    """Seconds of both, over all utterances; the model has numbers for so many slots, or for more."""
    corpus = Corpus(generate.utterances(examples))
    labels = Labels.of_rows(corpus, np.arange(len(corpus)))
    names = {tag[2:] for tag in labels.tags if tag != OUTSIDE}
    more = {"intents": labels.intents, "slots": sorted(names) + [f"slot {i}" for i in range(slots - len(names))]}
    torch.manual_seed(0)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(more))
        file.flush()
        config = Config(task="generated", model=model, private="off", labels=file.name)
        parts = run.build(config, corpus, np.arange(len(corpus)))
    parts.model.eval()
    seconds = {"prediction": 0.0, "features": 0.0}
    for begin in range(0, examples, PART):
        rows = np.arange(begin, min(begin + PART, examples))
        for name, work in (("prediction", predictions), ("features", view)):
            started = time.perf_counter()
            work(parts, corpus, rows)
            seconds[name] += time.perf_counter() - started
    ratio = seconds["features"] / seconds["prediction"]
    return {
        "model": model,
        "tags": len(parts.labels.tags),
        "prediction": seconds["prediction"],
        "features": seconds["features"],
        "ratio": ratio,
    }


def predictions(parts: Parts, corpus: Corpus, rows: Rows) -> list[Prediction]:
    """The likeliest intent and tags, in the same batches as the features."""
    examples = Examples(corpus, rows, parts.inputs.table(corpus.words), parts.labels, BATCH)
    batches = examples.buckets(np.arange(len(rows)))
    return [prediction for batch in batches for prediction in parts.model.predict(batch)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = results.reducible("attack_cost", __doc__)
    parser.add_argument("--examples", type=int, default=100_000, metavar="N")
    flags = parser.parse_args(arguments)
    examples = PART // 5 if flags.reduced else flags.examples
    torch.set_num_threads(1)
    start = time.monotonic()
    command = results.command("attack_cost", flags)
    found: AttackCost = {"command": command, "seed": 0, "machine": machine(), "examples": examples, "rows": []}
    for model, slots in itertools.product(("clc", "bert"), SLOTS):
        found["rows"].append(measure(model, slots, examples))
        print(found["rows"][-1], flush=True)
    found["minutes"] = (time.monotonic() - start) / 60
    results.save(flags.out, "attack_cost", found, page("attack_cost", found))


if __name__ == "__main__":
    main()
