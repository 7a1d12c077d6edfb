"""What the rank of a canary costs: `python -m benchmarks.exposure`, with the language model of full size.

One canary of five words against random suffixes of three words after its first two. With random weights all suffixes
cost about the same and none can be given up before its last word: the slowest case. The other case is a model that has
learned the canary by heart.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.harness import results
from benchmarks.harness.results import machine
from benchmarks.harness.rows.exposure import CanaryRank, Exposure
from benchmarks.report.render import page
from mia.extraction import CHUNK, PREFIX, Phrases, exposure, random_suffixes, rank
from mia.phrases import Canary, Configuration, make
from mia.secret_sharer import SUFFIXES
from models.language_model import LanguageModel
from tasks.language.user_texts import windows

WORDS = 10_003  # rows of the table


def learn(model: LanguageModel, canary: Canary, steps: int = 30) -> None:
    """Trains on nothing but the canary."""
    inputs, targets = (torch.from_numpy(part) for part in windows([np.array(canary.words)]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model.losses(inputs, targets).sum().backward()
        optimizer.step()


def one_rank(model: LanguageModel, canary: Canary, drawn: Phrases) -> CanaryRank:
    """Time of one canary, and its rank."""
    begin, processor = time.perf_counter(), time.process_time()
    found = rank(model, canary.words, drawn)
    return {
        "seconds": time.perf_counter() - begin,
        "processor_seconds": time.process_time() - processor,
        "rank": found.rank,
        "exposure": exposure(found.rank, found.candidates),
    }


def measure(suffixes: int, command: str) -> Exposure:
    """Both cases, and the memory."""
    start = time.monotonic()
    torch.manual_seed(0)
    model = LanguageModel(WORDS)
    canary = make(WORDS, [Configuration(0.0, 0.0)], per_configuration=1, seed=0)[0]
    drawn = random_suffixes(WORDS, suffixes, len(canary.words) - PREFIX, seed=0)
    before = _peak()
    unseen = one_rank(model, canary, drawn)
    grown = _peak() - before
    learn(model, canary)
    return {
        "command": command,
        "seed": 0,
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "suffixes": suffixes,
        "chunk": CHUNK,
        "grown": grown,
        "unseen": unseen,
        "learned": one_rank(model, canary, drawn),
        "minutes": (time.monotonic() - start) / 60,
    }


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = results.reducible("exposure", __doc__)
    parser.add_argument("--suffixes", type=int, default=SUFFIXES, metavar="N")
    flags = parser.parse_args(arguments)
    suffixes = SUFFIXES // 100 if flags.reduced else flags.suffixes
    found = measure(suffixes, results.command("exposure", flags))
    results.save(flags.out, "exposure", found, page("exposure", found))


if __name__ == "__main__":
    main()
