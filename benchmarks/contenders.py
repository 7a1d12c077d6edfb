"""Who is compared in step_time: plain training, ours with units of every size, and Opacus on what it can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers import DPLSTM
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertModel

import edpsgd
from models.bert import BERT, paper_configuration
from models.clc import CLC

Batch = dict[str, Tensor]

WORDS = {"bert": 30522, "clc": 5000}
DIMENSION, LETTERS = 300, 8  # of CLC's word vectors; of its words
TAGS, INTENTS = 20, 10
GROUPS = 4  # micro-batches in one pass
NOISE, CLIP_NORM = 0.8, 1.0
NAMES = {
    "sgd": "SGD (`hvd.DistributedOptimizer`)",
    "edp_sharded": "eDP-SGD, sharded noise (default)",
    "edp_per_worker": "eDP-SGD, per-worker noise",
    "groups": f"{GROUPS} micro-batches in one pass",
    "example": "single examples in one pass",
    "loop": "single examples in a loop",
    "opacus_hooks": "Opacus, per-example gradients",
    "opacus_ghost": "Opacus, ghost clipping",
}
OURS = ("sgd", "edp_sharded", "edp_per_worker", "groups", "example", "loop")
PEERS = ("sgd", "example", "opacus_hooks", "opacus_ghost")


# -------------------------------------------------------------------- models


class PlainBert(nn.Module):
    """BERT as Opacus can train it: no CRF, and position ids of its own for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(paper_configuration(WORDS["bert"]), add_pooling_layer=False)
        width = self.bert.config.hidden_size
        self.intent, self.slots = nn.Linear(width, INTENTS), nn.Linear(width, TAGS)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of every example."""
        words = batch["pieces"]
        positions = torch.arange(words.shape[1]).repeat(len(words), 1)
        hidden = self.bert(input_ids=words, position_ids=positions, token_type_ids=torch.zeros_like(words))[0]
        return _losses(self.intent(hidden.mean(1)), self.slots(hidden[:, 1:-1]), batch)


class PlainLstm(nn.Module):
    """CLC as Opacus can train it: no CRF, no character CNN, and its own LSTM in the place of torch's."""

    def __init__(self, lstm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS["clc"], DIMENSION)
        self.lstm = lstm(DIMENSION, 384, num_layers=2, batch_first=True, bidirectional=True)
        self.intent, self.slots = nn.Linear(768, INTENTS), nn.Linear(768, TAGS)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of every example."""
        states = self.lstm(self.words(batch["words"]))[0]
        return _losses(self.intent(states.amax(1)), self.slots(states), batch)


def _losses(intents: Tensor, tags: Tensor, batch: Batch) -> Tensor:
    slots = cross_entropy(tags.transpose(1, 2), batch["tags"], reduction="none").sum(1)
    return slots + cross_entropy(intents, batch["intents"], reduction="none")


def make_model(kind: str, contender: str, is_peer: bool) -> nn.Module:
    """The same weights for all who train the same model."""
    torch.manual_seed(0)
    if is_peer:
        own_lstm = contender.startswith("opacus")
        return PlainBert() if kind == "bert" else PlainLstm(DPLSTM if own_lstm else nn.LSTM)
    if kind == "bert":
        return BERT(paper_configuration(WORDS[kind]), INTENTS, TAGS)
    model = CLC(WORDS[kind], DIMENSION, INTENTS, TAGS, train_words=True)
    model.keeps_apart = contender in ("groups", "example", "loop")
    return model


def make_batches(kind: str, tokens: int, size: int, seed: int) -> tuple[Batch, list[Batch]]:
    """Random utterances, all of one length: together, and one by one."""
    rng = np.random.default_rng(seed)
    words = np.minimum(rng.zipf(1.3, (size, tokens)), WORDS[kind] - 1)
    spelled = rng.integers(2, 60, (WORDS[kind], LETTERS))
    labels = rng.integers(0, TAGS, (size, tokens)), rng.integers(0, INTENTS, size)

    def batch(rows: slice) -> Batch:
        parts = _pieces(words[rows]) if kind == "bert" else _distinct(words[rows], spelled)
        parts |= {"mask": np.ones_like(words[rows], dtype=bool), "tags": labels[0][rows], "intents": labels[1][rows]}
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in parts.items()}

    return batch(slice(None)), [batch(slice(row, row + 1)) for row in range(size)]


def _pieces(words: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Every word is one piece, between the two that frame an utterance."""
    framed = np.pad(words, ((0, 0), (1, 1)), constant_values=1)
    return {"pieces": framed, "read": np.ones_like(framed), "first": np.arange(1, words.shape[1] + 1) + 0 * words}


def _distinct(words: np.ndarray[Any, Any], spelled: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    rows, place = np.unique(words, return_inverse=True)
    place = place.reshape(words.shape)
    lengths = np.full(len(words), words.shape[1])
    return {"words": words, "rows": rows, "characters": spelled[rows], "place": place, "lengths": lengths}


# -------------------------------------------------------------------- steps


@dataclass
class Contender:
    """A model, its optimizer and what makes a step of a batch.

    Attributes:
        model: what is trained.
        optimizer: a PrivateOptimizer, or another one.
        step: one training step, on a batch and the same examples one by one.
    """

    model: nn.Module
    optimizer: Any
    step: Callable[[Batch, list[Batch]], None]


def make(contender: str, kind: str, size: int, is_peer: bool, folder: Path) -> Contender:
    """A contender with so many examples for each worker; a ledger goes to the folder."""
    import horovod.torch as hvd

    model = make_model(kind, contender, is_peer)
    if contender.startswith("opacus"):
        return _opacus(contender, model, size)
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    if contender == "sgd":
        optimizer: Any = hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())
        return Contender(model, optimizer, partial(_mean_step, model, optimizer))
    settings: Mapping[str, Any] = {"unit": "micro_batch"}
    if contender in ("example", "loop"):
        settings = {"unit": "example", "divisor": size * hvd.size()}
    optimizer = edpsgd.PrivateOptimizer(
        adam,
        model.named_parameters(),
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE,
        noise_decay=edpsgd.LinearDecay(0.05),
        noise_placement="per_worker" if contender == "edp_per_worker" else "sharded",
        ledger=folder / f"{kind}-{contender}.jsonl",
        **settings,
    )
    steps = {"groups": _groups_step, "example": _example_step, "loop": _loop_step}
    return Contender(model, optimizer, partial(steps.get(contender, _mean_step), model, optimizer))


def _mean_step(model: nn.Module, optimizer: Any, batch: Batch, _: list[Batch]) -> None:
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()


def _groups_step(model: nn.Module, optimizer: Any, batch: Batch, _: list[Batch]) -> None:
    losses = model(batch)
    optimizer.backward(losses, units=torch.arange(len(losses)) * GROUPS // len(losses), count=GROUPS)
    optimizer.step()


def _example_step(model: nn.Module, optimizer: Any, batch: Batch, _: list[Batch]) -> None:
    optimizer.backward(model(batch))
    optimizer.step()


def _loop_step(model: nn.Module, optimizer: Any, _: Batch, examples: list[Batch]) -> None:
    optimizer.zero_grad()
    for example in examples:
        model(example).sum().backward()
        optimizer.accumulate()
    optimizer.step()


def _opacus(contender: str, model: nn.Module, size: int) -> Contender:
    """Each worker noises its own share, then Horovod sums: Opacus itself knows torch.distributed only."""
    import horovod.torch as hvd

    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    share = {"noise_multiplier": NOISE / hvd.size() ** 0.5, "max_grad_norm": CLIP_NORM, "expected_batch_size": size}
    if contender == "opacus_hooks":
        wrapped: Any = GradSampleModule(model)
        optimizer: Any = DPOptimizer(adam, **share)
    else:
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(adam, **share)

    def step(batch: Batch, _: list[Batch]) -> None:
        optimizer.zero_grad()
        losses = wrapped(batch)
        if contender == "opacus_hooks":
            losses.mean().backward()
        else:
            DPTensorFastGradientClipping(wrapped, optimizer, losses).backward()
        optimizer.pre_step()
        hvd.grouped_allreduce_([p.grad for p in model.parameters()], name="opacus")
        optimizer.original_optimizer.step()

    return Contender(wrapped, optimizer, step)
