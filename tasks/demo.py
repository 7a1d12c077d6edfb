"""`make demo`: a private fine-tune on generated utterances, then the same without privacy, side by side.

Each is one job of tasks.train; the settings below could as well be flags. The noise is in the
range that the paper searches, and the card says how little it promises: ε is above 100,000. A small ε needs more
units in a step than this demo has (`edpsgd plan` tells how much noise, `--private example` trades time for it).
"""

from __future__ import annotations

import time
from dataclasses import replace

from tasks.config import Config
from tasks.train import table, train
from tasks.workers import workers

PRIVATE = Config(
    task="generated",
    examples=8_000,
    model="clc",
    hidden=48,
    layers=1,
    dimension=32,
    dropout=0.0,
    epochs=5,
    batch_size=8,
    micro_batches=2,
    learning_rate=0.01,
    private="edp",
    sampling="poisson",
    noise_multiplier=0.01,
    decay="linear:0.1",
    delta=1e-5,
)


def main() -> None:
    """Both jobs, a table and the card."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with workers() as team:
        private = train(replace(PRIVATE, output=f"runs/demo-{stamp}"), team)
        if team.is_first:
            print("\nthe same without privacy", flush=True)
        plain = train(replace(PRIVATE, private="off", noise_multiplier=None, output=f"runs/plain-{stamp}"), team)
    if private is not None and plain is not None and private.card is not None:
        print(table({"edp": private, "off": plain}))
        print(f"\n{private.card.markdown()}\n")
        print(f'try it: python -m tasks.predict --run {private.folder} --text "call anna at 0123"')


if __name__ == "__main__":
    main()
