"""A run folder: all that a colleague needs to use a model, or the job to go on.

config.yaml, data.json (counts), labels.json, model.json, vocabulary/ (words, or a tokenizer), weights.safetensors,
metrics.jsonl, ledger.jsonl, the privacy card, checkpoints/ and tensorboard/; canaries.jsonl if there are any.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edpsgd import files
from models.bert import BERT, BertInputs
from models.clc import CLC, ClcInputs
from models.frozen_clc import FrozenCLC, FrozenClcInputs
from models.heads import IntentSlotModel
from tasks.common import checkpoints, progress
from tasks.common.run_opening import WEIGHTS
from tasks.nlu.configuration import Config
from tasks.nlu.labels import Labels
from tasks.nlu.splits import Split

KINDS: dict[str, Any] = {
    "clc": (CLC, ClcInputs),
    "frozen-clc": (FrozenCLC, FrozenClcInputs),
    "bert": (BERT, BertInputs),
}


@dataclass
class Parts:
    """A model with what stands around it."""

    model: IntentSlotModel
    inputs: ClcInputs | BertInputs
    labels: Labels

    @files.private()
    def save(self, folder: Path) -> None:
        """Everything but the weights, which change."""
        files.make_private(folder)
        files.write_text(folder / "labels.json", json.dumps(asdict(self.labels), indent=1))
        kinds = [kind for kind, (model_class, _) in KINDS.items() if isinstance(self.model, model_class)]
        about = {"kind": kinds[0], "settings": self.model.settings()}
        files.write_text(folder / "model.json", json.dumps(about, indent=1))
        self.inputs.save(folder / "vocabulary")

    def save_weights(self, folder: Path) -> None:
        """All tensors of the model."""
        checkpoints.save_weights(folder / WEIGHTS, self.model.state_dict())


def load(folder: str | Path) -> Parts:
    """The model of a run folder, on the CPU and ready to predict."""
    folder = Path(folder)
    try:
        about = files.read_json(folder / "model.json")
        labels = Labels(**files.read_json(folder / "labels.json"))
        model_class, inputs_class = KINDS[about["kind"]]
        model = model_class(**about["settings"], intents=len(labels.intents), tags=len(labels.tags))
        model.load_state_dict(checkpoints.load_weights(folder / WEIGHTS))
        return Parts(model.eval(), inputs_class.load(folder / "vocabulary"), labels)
    except Exception as error:  # those of json, torch and the tokenizers are of many kinds
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} is not a run folder, or it is damaged: {reason}") from error


def load_to_train(folder: str | Path, config: Config) -> Parts:
    """The model of a run folder, to train it further: what was frozen is so again."""
    parts = load(folder)
    if isinstance(parts.model, BERT):
        parts.model.freeze(config.freeze)
    return parts


def has_ended(folder: str | Path) -> bool:
    """Whether the training has ended; until then its folder holds the initial weights."""
    if not Path(folder, "config.yaml").exists():
        return True  # no job is at work there
    metrics = Path(folder, progress.METRICS)
    lines = files.read_text(metrics, files.LARGE).splitlines() if metrics.exists() else []
    return any('"test_ser"' in line for line in lines)


def check_ended(folder: str | Path) -> None:
    """Refuses a training that has not ended."""
    if not has_ended(folder):
        raise ValueError(f"the training of {folder} has not ended: go on with tasks.train --resume {folder}")


def check_data(folder: str | Path, rows: Split) -> dict[str, Any]:
    """Refuses data whose parts have other sizes than those of the run.

    Returns:
        What the run says about its data: the content of data.json.
    """
    try:
        facts = files.read_json(Path(folder, "data.json"))
        before = {name: facts[name] for name in vars(rows)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}/data.json is damaged: {type(error).__name__}") from None
    now = {name: len(part) for name, part in vars(rows).items()}
    if before != now:
        raise ValueError(f"the data are not those of the run {folder}: it had other numbers of utterances, now {now}")
    return dict(facts)
