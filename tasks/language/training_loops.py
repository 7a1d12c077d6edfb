"""The loops of a language-model job: rounds on users, or steps of plain SGD on sentences."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import edpsgd
from edpsgd import FedAvg, Federated, FedSGD
from models.language_model import LanguageModel
from tasks.common.run_opening import LEDGER
from tasks.common.workers import Workers
from tasks.language.configuration import Config, parse_changes
from tasks.language.noise_plan import make_users, noise_multiplier
from tasks.language.user_texts import UserData, Words, windows

Windows = tuple[torch.Tensor, torch.Tensor]
_CHECKED = 6  # users whose losses are tried in changing company before the first round
_NO_CLIPPING = 1e9  # a norm that no update reaches


class UserTraining:
    """Rounds of DP-FedAvg or DP-FedSGD; without noise and clipping, of the plain algorithms."""

    def __init__(self, config: Config, team: Workers, model: LanguageModel, data: UserData, folder: Path) -> None:
        self._config, self._model, self._data, self._device = config, model, data, team.device
        self._changes = parse_changes(config.clip_changes)
        sampler = make_users(config, data, team.collective)
        algorithm: FedAvg | FedSGD = FedAvg(config.learning_rate, config.local_epochs)
        if config.algorithm == "fedsgd":
            algorithm = FedSGD(config.learning_rate)
        budget = None if config.epsilon is None else edpsgd.Budget(config.epsilon, config.delta)
        self.federated = Federated(
            model,
            make_optimizer(config.server, model, config.server_learning_rate),
            sampler,
            algorithm,
            clip_norm=config.clip_norm or _NO_CLIPPING,
            noise_multiplier=noise_multiplier(config, sampler),
            clipping=config.clipping,
            noise_placement=config.placement,
            collective=team.collective,
            seed=config.seed,
            ledger=folder / LEDGER if config.is_private else None,
            budget=budget,
        )
        self.optimizer = self.federated.optimizer
        team.together(self._check_losses)

    def _check_losses(self) -> None:
        """Refuses a model whose loss on one user's words depends on other users; all workers try the same ones."""
        users = list(islice(filter(partial(self._batches, 0), range(len(self._data))), _CHECKED))

        def losses(chosen: list[int]) -> torch.Tensor:
            return torch.stack([self._model.mean_loss(*self._batches(0, user)[0]) for user in chosen])

        if len(users) >= 2:
            edpsgd.check_losses(losses, users, model=self._model, optimizer=self.optimizer)

    def step(self, number: int) -> None:
        """One round."""
        self.optimizer.clip_norm = self._changes.get(number, self.optimizer.clip_norm)
        self.federated.round(partial(self._batches, number), lambda batch: self._model.mean_loss(*batch))

    def _batches(self, number: int, user: int) -> Sequence[Windows]:
        """A user's windows, in order; fedsgd, which takes one batch, has another in every round."""
        config = self._config
        found = list(batches(self._data.of_user(user), config.unroll, config.batch_size, self._device))
        if config.algorithm == "fedavg" or not found:
            return found
        return [found[number % len(found)]]

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer, with ledger and sampler."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a checkpoint was written."""
        self.optimizer.load_state_dict(state)


class SentenceTraining:
    """Plain SGD, the baseline: sentences in order, of one user after the other, users in a new order every time.

    If the sentences were dealt anew (--iid), this is SGD on shuffled sentences.
    """

    def __init__(self, config: Config, team: Workers, model: LanguageModel, data: UserData) -> None:
        if team.collective.size > 1:
            raise ValueError("--algorithm sgd is a baseline for one process: start it without a launcher")
        self._config, self._model, self._data, self._device = config, model, data, team.device
        self.optimizer = make_optimizer(config.server, model, config.learning_rate)
        self._seed = secrets.randbits(62) if config.seed is None else config.seed
        self._pass, self._order = -1, np.empty(0, np.int64)

    def step(self, number: int) -> None:
        """One step on some sentences."""
        size, all_sentences = self._config.batch_size, len(self._data.sentences) - 1
        places = range(number * size, (number + 1) * size)
        chosen = [self._sentence(*divmod(place, all_sentences)) for place in places]
        self.optimizer.zero_grad()
        for batch in batches(chosen, self._config.unroll, size * self._config.budget, self._device):
            self._model.mean_loss(*batch).backward()
        self.optimizer.step()

    def _sentence(self, turn: int, place: int) -> Words:
        """Of a pass over all data, which has an order of its own."""
        if turn != self._pass:
            order = np.random.default_rng([self._seed, turn]).permutation(len(self._data))
            bounds = [np.arange(self._data.users[k], self._data.users[k + 1]) for k in order]
            self._pass, self._order = turn, np.concatenate(bounds)
        at = int(self._order[place])
        return self._data.tokens[self._data.sentences[at] : self._data.sentences[at + 1]]

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer, and the order of the users."""
        return {"optimizer": self.optimizer.state_dict(), "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a checkpoint was written."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._seed = state["seed"]


def batches(sentences: Sequence[Words], unroll: int, size: int, device: torch.device) -> Iterator[Windows]:
    """The windows of some sentences, so many at a time; none if there are no words."""
    inputs, targets = (torch.from_numpy(part) for part in windows(sentences, unroll))
    for pair in zip(inputs.split(size), targets.split(size), strict=True):
        if len(pair[0]):
            yield pair[0].to(device, non_blocking=True), pair[1].to(device, non_blocking=True)


def make_optimizer(name: str, model: LanguageModel, rate: float) -> torch.optim.Optimizer:
    """As in Table 4 of Thakkar et al. 2021: plain, with momentum 0.9, or Adam."""
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if name == "momentum" else 0.0)
