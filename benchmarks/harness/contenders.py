"""Who is compared: plain training, ours with units of every size, and Opacus on the models that it can train."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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

DIMENSION = 300  # of CLC's word vectors
GROUPS = 4  # micro-batches in one pass
NOISE, CLIP_NORM = 0.8, 1.0
NAMES = {
    "sgd": "SGD (`hvd.DistributedOptimizer`)",
    "edp": "eDP-SGD, K = 1",
    "edp_per_worker": "eDP-SGD, K = 1, per-worker noise",
    "groups": f"eDP-SGD, K = {GROUPS} in one pass",
    "example": "single examples in one pass",
    "verified": 'single examples, `verify="always"`',
    "loop": "vanilla DP-SGD (loop over examples)",
    "opacus_hooks": "Opacus, per-example gradients",
    "opacus_ghost": "Opacus, ghost clipping",
}
PEERS = ("sgd", "example", "opacus_hooks", "opacus_ghost")
SLOW = ("loop", "opacus_hooks")  # measured less often
CHANGES = {  # for Opacus
    "bert": "no CRF (Opacus has no rule for it); every example has position ids of its own (their gradient is wrong "
    "where ids are broadcast)",
    "clc": "no CRF, no character CNN, padded instead of packed sequences; Opacus's own LSTM in the place of torch's",
}


@dataclass(frozen=True)
class Sizes:
    """Of a model's word table and heads."""

    words: int
    intents: int
    tags: int


SIZES = {  # by kind of model; "tiny" is there to try what measures the others
    "bert": Sizes(30522, 10, 20),
    "clc": Sizes(5000, 10, 20),
    "tiny": Sizes(20, 2, 3),
}

# -------------------------------------------------------------------- models


class PlainBert(nn.Module):
    """BERT as Opacus can train it: see CHANGES."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bert = BertModel(paper_configuration(sizes.words), add_pooling_layer=False)
        width = self.bert.config.hidden_size
        self.intent, self.slots = nn.Linear(width, sizes.intents), nn.Linear(width, sizes.tags)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of every example."""
        pieces, read = batch["pieces"], batch["read"]
        positions = torch.arange(pieces.shape[1]).repeat(len(pieces), 1)
        types = torch.zeros_like(pieces)
        hidden = self.bert(input_ids=pieces, attention_mask=read, position_ids=positions, token_type_ids=types)[0]
        words = hidden.gather(1, batch["first"].unsqueeze(2).expand(-1, -1, hidden.shape[2]))
        weights = read.unsqueeze(2).to(hidden)
        return _losses(self.intent((hidden * weights).sum(1) / weights.sum(1)), self.slots(words), batch)


class PlainLstm(nn.Module):
    """CLC as Opacus can train it: see CHANGES."""

    def __init__(self, sizes: Sizes, lstm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, DIMENSION)
        self.lstm = lstm(DIMENSION, 384, num_layers=2, batch_first=True, bidirectional=True)
        self.intent, self.slots = nn.Linear(768, sizes.intents), nn.Linear(768, sizes.tags)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of every example."""
        states = self.lstm(self.words(batch["rows"][batch["place"]]))[0]
        return _losses(self.intent(states.amax(1)), self.slots(states), batch)


def _losses(intents: Tensor, tags: Tensor, batch: Batch) -> Tensor:
    slots = cross_entropy(tags.transpose(1, 2), batch["tags"], reduction="none")
    return (slots * batch["mask"]).sum(1) + cross_entropy(intents, batch["intents"], reduction="none")


def make_model(kind: str, contender: str, is_peer: bool, sizes: Sizes) -> nn.Module:
    """The same weights for all who train the same model (Opacus's LSTM draws its own)."""
    torch.manual_seed(0)
    if is_peer:
        own_lstm = contender.startswith("opacus")
        return PlainBert(sizes) if kind == "bert" else PlainLstm(sizes, DPLSTM if own_lstm else nn.LSTM)
    if kind == "bert":
        return BERT(paper_configuration(sizes.words), sizes.intents, sizes.tags)
    if kind == "tiny":
        model = CLC(sizes.words, 8, sizes.intents, sizes.tags, train_words=True, hidden=4, layers=1, filters=4)
    else:
        model = CLC(sizes.words, DIMENSION, sizes.intents, sizes.tags, train_words=True)
    model.keeps_apart = contender in ("groups", "example", "verified", "loop")
    return model


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


def make(contender: str, kind: str, is_peer: bool, sizes: Sizes, size: int, folder: Path) -> Contender:
    """A contender with so many examples for each worker; a ledger goes to the folder."""
    import horovod.torch as hvd

    model = make_model(kind, contender, is_peer, sizes)
    if contender.startswith("opacus"):
        return _opacus(contender, model, size)
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    if contender == "sgd":
        optimizer: Any = hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())
        return Contender(model, optimizer, partial(_mean_step, model, optimizer))
    settings: Mapping[str, Any] = {"unit": "micro_batch"}
    if contender in ("example", "verified", "loop"):
        settings = {"unit": "example", "divisor": size * hvd.size()}
    optimizer = edpsgd.PrivateOptimizer(
        adam,
        model.named_parameters(),
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE,
        noise_decay=edpsgd.LinearDecay(0.05),
        noise_placement="per_worker" if contender == "edp_per_worker" else "sharded",
        verify="always" if contender == "verified" else "spot",
        ledger=folder / f"{kind}-{contender}.jsonl",
        **settings,
    )
    steps = {"groups": _groups_step, "example": _example_step, "verified": _example_step, "loop": _loop_step}
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
    """Each worker noises its own share, then Horovod averages: Opacus itself knows torch.distributed only."""
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


def take_turns(
    contenders: Mapping[str, Contender], number: int, batch: Batch, examples: list[Batch], names: Sequence[str]
) -> dict[str, float]:
    """One step of each on the same batch, in seconds. Another one begins each time, and all workers begin together."""
    import horovod.torch as hvd

    seconds = {}
    for shift in range(len(names)):
        name = names[(number + shift) % len(names)]
        hvd.barrier()
        start = time.perf_counter()
        contenders[name].step(batch, examples)
        seconds[name] = time.perf_counter() - start
    return seconds
