"""Shadow models: trainings like the target's on data of the attacker's choice, several at a time, kept and resumed.

Each is one job of tasks.train in a folder of its own. One that is complete is not trained again, and one that was
interrupted goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from edpsgd import files
from mia.candidates import Run
from tasks.nlu import encoder_states
from tasks.nlu.configuration import Config, read_file, write_file
from tasks.nlu.corpus import OUTSIDE, Corpus, Rows
from tasks.nlu.run_folder import has_ended
from tasks.nlu.splits import split

FIRST_SEED = 1_000_000  # of the shadows' splits, far from a target's


def like_target(target: Run, folder: Path, number: int) -> list[Config]:
    """Trainings as the target's, each on its own random 45 % of the target's corpus.

    Splits by hash: equal utterances are together, inside or outside. The labels are those of the whole corpus, so that
    every shadow has a number for every candidate's. A frozen encoder's states are those that the target kept or read.

    Args:
        target: the run under attack.
        folder: where the shadows go.
        number: how many.
    """
    files.make_private(folder)
    labels = folder / "labels.json"
    files.write_text(labels, json.dumps(_all_labels(target.data.corpus)))
    alone = _alone(target.config, target.workers)
    return [
        replace(
            alone,
            split="hash",
            split_seed=FIRST_SEED + shadow,
            seed=FIRST_SEED + shadow if alone.private == "off" else None,  # that of noise is nobody's business
            labels=str(labels),
            states_from=_states_place(target),
            output=str(folder / f"shadow-{shadow:03d}"),
        )
        for shadow in range(number)
    ]


def _states_place(target: Run) -> str | None:
    """Where shadows find the hidden states of the target's corpus, if they have its encoder and its utterances."""
    config = target.config
    place = encoder_states.kept_by(target.folder, config)
    if place is None or config.freeze != "encoder" or config.canaries > 0:  # shadows have no canaries
        return None
    return str(place)


def on_task(target: Run, folder: Path, task: str, data: str | None) -> Config:
    """A training as the target's on another corpus.

    Args:
        target: the run under attack.
        folder: where the shadow goes.
        task: the name of the other corpus; utterances that are generated are others than the target's.
        data: the data folder.
    """
    if task == target.config.task != "generated":
        raise ValueError(f"the shadow's task must be another than the target's, which is {task} too")
    alone = _alone(target.config, target.workers)
    return replace(
        alone,
        task=task,
        data=data,
        data_seed=FIRST_SEED,
        labels="training-set",
        output=str(folder / f"shadow-{task}"),
    )


def insides(configs: Sequence[Config], corpus: Corpus, rows: Rows) -> npt.NDArray[np.bool_]:
    """Which rows each shadow of a corpus was trained on, shadows x rows."""
    found = np.zeros((len(configs), len(rows)), bool)
    for number, config in enumerate(configs):
        found[number] = np.isin(rows, split(corpus, config.split, config.split_seed).train)
    return found


def train_all(configs: Sequence[Config], jobs: int = 1) -> None:
    """Trains whatever is not complete.

    Args:
        configs: the shadows; their outputs are their folders.
        jobs: how many at a time; the cores are shared among them.
    """
    waiting = [config for config in configs if not _is_complete(config)]
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(configs), unit="shadow", disable=None) as bar:
        bar.update(len(configs) - len(waiting))
        try:
            for _ in pool.map(lambda config: _train(config, threads), waiting):
                bar.update(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _train(config: Config, threads: int) -> None:
    """One job, in a process of its own; its log is in its folder."""
    folder = Path(config.output or "")
    if (folder / "config.yaml").exists():
        flags = ["--resume", str(folder)]
    else:
        shutil.rmtree(folder, ignore_errors=True)  # one that ended before its training began
        folder.mkdir(mode=0o700, parents=True)
        write_file(folder / "settings.yaml", config)
        flags = ["--config", str(folder / "settings.yaml")]
    command = [sys.executable, "-m", "tasks.train", *flags, "--threads", str(threads)]
    with files.open_to_append(folder / "log.txt") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code != 0:
        raise ValueError(f"the training of a shadow ended with status {code}: see {folder / 'log.txt'}")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # nobody goes on with it


def _is_complete(config: Config) -> bool:
    """Whether the folder holds the finished training; one with other settings is refused."""
    folder = Path(config.output or "")
    if not (folder / "config.yaml").exists():
        return False
    before = Config(**read_file(folder / "config.yaml"))
    places = {"data", "labels"}  # which may be called by other names
    names = {item.name for item in fields(Config) if item.metadata["group"] != "machine"} - places
    changed = sorted(name for name in names if getattr(before, name) != getattr(config, name))
    if changed:
        raise ValueError(
            f"{folder} holds a shadow with other settings ({', '.join(changed)}): delete it, or name another --output"
        )
    return has_ended(folder)


def _alone(config: Config, workers: int) -> Config:
    """The same training in one process: what the workers did side by side, it does in turn."""
    wider = "micro_batches" if config.private == "edp" else "batch_size"
    size = {wider: getattr(config, wider) * workers}
    return replace(
        config,
        **size,
        seed=None,
        canaries=0,
        tensorboard=False,
        checkpoint_every=0,
        threads=None,
        keep_features=False,
        states_from=None,  # those of another corpus are of no use
    )


def _all_labels(corpus: Corpus) -> dict[str, list[str]]:
    slots = {tag[2:] for tag in corpus.tags if tag != OUTSIDE}
    return {"intents": sorted(corpus.intents), "slots": sorted(slots)}
