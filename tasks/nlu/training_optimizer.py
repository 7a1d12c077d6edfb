"""The optimizer of a training: what it trains, its noise if there is any, its learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import edpsgd
from edpsgd.sampling.base import Batches
from models.heads import IntentSlotModel
from tasks.common.run_opening import LEDGER
from tasks.common.workers import Workers
from tasks.nlu.configuration import Config
from tasks.nlu.noise_plan import Plan, layer_scaling


def make_optimizer(
    config: Config,
    workers: Workers,
    model: IntentSlotModel,
    batches: Batches,
    plan: Plan | None,
    folder: Path,
) -> torch.optim.Optimizer:
    """The optimizer over two parameter groups, the encoder's and the heads'.

    Args:
        config: the settings.
        workers: who takes part.
        model: whose trained parameters it steps on.
        batches: the sampler.
        plan: the noise, None for plain training.
        folder: the run folder, which holds the ledger.

    Returns:
        A PrivateOptimizer around it if there is a plan; else one that averages over the workers.
    """
    groups = _parameter_groups(model)
    inner = _inner_optimizer(config, groups)
    if plan is None:
        return workers.averaged(inner, model)
    edpsgd.check_model(model)
    budget = None if config.epsilon is None else edpsgd.Budget(config.epsilon, config.delta)
    return edpsgd.PrivateOptimizer(
        inner,
        model.named_parameters(),
        clip_norm=config.clip_norm,
        noise_multiplier=plan.noise_multiplier,
        noise_decay=plan.decay,
        clipping=config.clipping,
        unit="example" if config.private == "example" else "micro_batch",
        layer_scaling=layer_scaling(config),
        noise=config.noise,
        noise_placement=config.placement,
        collective=workers.collective,
        seed=config.seed,
        ledger=folder / LEDGER,
        batches=batches,
        budget=budget,
        selection=plan.selection,
    )


def _inner_optimizer(config: Config, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What ``--optimizer`` names; its rates are set before every step."""
    decay = config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, weight_decay=decay, fused=True)


def _parameter_groups(model: IntentSlotModel) -> list[dict[str, list[torch.nn.Parameter]]]:
    """The trained parameters of the encoder and of the heads, in the order of initial_rates."""
    heads = {id(parameter) for parameter in model.head_parameters()}
    of_encoder: list[torch.nn.Parameter] = []
    of_heads: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        group = of_heads if id(parameter) in heads else of_encoder
        group.append(parameter)
    return [{"params": of_encoder}, {"params": of_heads}]


def initial_rates(config: Config) -> list[float]:
    """The learning rates of the encoder and of the heads, before warmup and schedule."""
    usual = 1e-3 if config.model == "clc" else 5e-5
    encoder = config.learning_rate or usual
    heads = config.head_learning_rate or max(encoder, 1e-3)
    return [encoder, heads]


def rate_factor(config: Config, steps_taken: int, total_steps: int) -> float:
    """What the initial learning rates are multiplied by in the next step, from 0 to 1.

    Example:
        >>> config = Config(private="off", warmup=0.2)
        >>> [round(rate_factor(config, taken, total_steps=10), 3) for taken in range(4)]
        [0.5, 1.0, 1.0, 0.875]
    """
    progress = steps_taken / total_steps
    factor = 1.0
    if config.warmup:  # it rises to 1, and the first step is above 0
        after_this_step = progress + 1 / total_steps
        factor = min(factor, after_this_step / config.warmup)
    if config.schedule == "linear":  # and falls to 0 after that
        factor = min(factor, (1 - progress) / max(1e-9, 1 - config.warmup))
    return factor


def set_rates(
    optimizer: torch.optim.Optimizer,
    config: Config,
    steps_taken: int,
    total_steps: int,
) -> None:
    """Sets the learning rates of the next step.

    They are a function of the place in the training, so that a resumed run has the same.
    """
    factor = rate_factor(config, steps_taken, total_steps)
    rates = initial_rates(config)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
