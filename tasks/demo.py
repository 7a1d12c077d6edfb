"""`make demo`: a private fine-tune on generated utterances, then the same without privacy, side by side.

Each is one job of tasks.train; the settings below could as well be flags.
"""

from __future__ import annotations

import sys
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
    epochs=8,
    batch_size=4,
    micro_batches=24,
    learning_rate=0.01,
    private="edp",
    sampling="poisson",
    epsilon=8.0,
    delta=1e-5,
    decay="linear:0.1",
)


def main() -> None:
    """Both jobs, a table and the card."""
    folder = f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}"
    with workers() as team:
        private = train(replace(PRIVATE, output=folder), team)
        if team.is_first:
            print("\nthe same without privacy", flush=True)
        plain = train(replace(PRIVATE, private="off", micro_batches=1, batch_size=16, output=f"{folder}-off"), team)
        if private is None or plain is None or private.card is None:
            return
        print(table({"edp": private, "off": plain}))
        print(f"\n{private.card.markdown()}\n")
        print(f"try it: {sys.executable} -m tasks.predict --run {private.folder} --text 'call anna at 0123'")


if __name__ == "__main__":
    main()
