"""Runs training jobs one after the other and kills some of them; started by test_resume.py, also with a launcher.

The argument is a JSON file: {"log": FOLDER, "fork": BOOL, "jobs": [{"arguments": [...], "kill": KILL or null}, ...]}
with KILL = {"place": PLACE, "step": N, "rank": R}. "fork" gives every job a process of its own, which may be killed and
the next one begun all the same. Each job's output goes to FOLDER/JOB-RANK.txt, and worker 0 notes every step that has
changed the model in FOLDER/steps-JOB.log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from edpsgd import PrivateOptimizer
from models.bert import BertInputs
from tasks import train
from tasks.common import checkpoints
from tasks.nlu.training_loop import Training
from tests.helpers.common import Bag, private
from tests.helpers.waiting import sleep_while_horovod_works

RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("RANK") or 0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch(log: Path, kill: dict[str, Any] | None) -> None:
    """Notes all steps, and ends the process at the place that ``kill`` names.

    "step": before a step. "paid": in its middle, when the ledger has been charged and the model has not changed.
    "saving": in the middle of the first checkpoint after it.
    """
    lethal = kill if kill is not None and kill["rank"] == RANK else {"place": "", "step": -1}
    take, update, save_weights = Training._step, PrivateOptimizer._update, checkpoints.save_weights
    now = [0]

    def step(self: Training, *arguments: Any) -> None:
        now[0] = self.state.step
        if lethal["place"] == "step" and now[0] == lethal["step"]:
            die()
        take(self, *arguments)
        if RANK == 0:
            with open(log, "ab", buffering=0) as file:
                file.write(b"step\n")

    def paid(self: PrivateOptimizer) -> None:
        if lethal["place"] == "paid" and now[0] == lethal["step"]:
            die()
        update(self)

    def saving(path: Path, state: Any) -> None:
        save_weights(path, state)
        if lethal["place"] == "saving" and path.name == "optimizer.safetensors" and now[0] >= lethal["step"]:
            die()

    Training._step, PrivateOptimizer._update, checkpoints.save_weights = step, paid, saving


def run(number: int, job: dict[str, Any], log: Path) -> None:
    """One job, whose output goes to a file, and its last word to another: two workers' mix in a launcher's output."""
    originals = Training._step, PrivateOptimizer._update, checkpoints.save_weights
    terminal = os.dup(1), os.dup(2)
    sys.stdout.flush()
    output = os.open(log / f"{number}-{RANK}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    watch(log / f"steps-{number}.log", job["kill"])
    try:
        train.main(job["arguments"])
    except SystemExit as ended:
        (log / f"error-{number}-{RANK}.txt").write_text(str(ended.code), encoding="utf-8")
        raise
    finally:
        sys.stdout.flush()
        os.dup2(terminal[0], 1)
        os.dup2(terminal[1], 2)
        Training._step, PrivateOptimizer._update, checkpoints.save_weights = originals


def forked(number: int, job: dict[str, Any], log: Path) -> None:
    """In a process of its own; says if it did not end as it should."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            run(number, job, log)
            code = 0
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if ended != (0 if job["kill"] is None else -signal.SIGKILL):
        raise RuntimeError(f"job {number} ended with {ended}: {(log / f'{number}-0.txt').read_text()[-3000:]}")


def main(plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if plan["fork"]:  # imports what torch and transformers import late, once for all jobs
        model = Bag((2,))
        private(model, torch.optim.AdamW(model.parameters()), collective="local").step()
        BertInputs.from_words(["call"])
        BertModel(BertConfig(vocab_size=5, hidden_size=2, num_hidden_layers=1, num_attention_heads=1))
    if "HOROVOD_RANK" in os.environ:
        sleep_while_horovod_works()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a second group in the same processes would meet the first
        torch.distributed.init_process_group("gloo")
    for number, job in enumerate(plan["jobs"]):
        if plan["fork"]:
            forked(number, job, Path(plan["log"]))
        else:
            run(number, job, Path(plan["log"]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
