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
        users_with_words = (user for user in range(len(self._data)) if self._batches(0, user))
        users = list(islice(users_with_words, _CHECKED))

        def losses(chosen: list[int]) -> torch.Tensor:
            first_batches = [self._batches(0, user)[0] for user in chosen]
            return torch.stack([self._model.mean_loss(*batch) for batch in first_batches])

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
        chosen = []
        for place in range(number * size, (number + 1) * size):
            turn, place_in_turn = divmod(place, all_sentences)
            chosen.append(self._sentence(turn, place_in_turn))
        self.optimizer.zero_grad()
        for batch in batches(chosen, self._config.unroll, size * self._config.budget, self._device):
            self._model.mean_loss(*batch).backward()
        self.optimizer.step()

    def _sentence(self, turn: int, place: int) -> Words:
        """The words of one sentence of a pass over all data; every pass has an order of its own."""
        data = self._data
        if turn != self._pass:
            users = np.random.default_rng([self._seed, turn]).permutation(len(data))
            sentences = [np.arange(data.users[user], data.users[user + 1]) for user in users]
            self._pass, self._order = turn, np.concatenate(sentences)
        sentence = int(self._order[place])
        return data.tokens[data.sentences[sentence] : data.sentences[sentence + 1]]

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer, and the order of the users."""
        return {"optimizer": self.optimizer.state_dict(), "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a checkpoint was written."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._seed = state["seed"]


def batches(sentences: Sequence[Words], unroll: int, size: int, device: torch.device) -> Iterator[Windows]:
    """The windows of some sentences, at most `size` at a time; none if there are no words.

    Yields:
        Inputs and targets, each (windows, unroll).
    """
    inputs, targets = (torch.from_numpy(part) for part in windows(sentences, unroll))
    for some_inputs, some_targets in zip(inputs.split(size), targets.split(size), strict=True):
        if len(some_inputs):
            yield (
                some_inputs.to(device, non_blocking=True),
                some_targets.to(device, non_blocking=True),
            )


def make_optimizer(name: str, model: LanguageModel, rate: float) -> torch.optim.Optimizer:
    """As in Table 4 of Thakkar et al. 2021: plain, with momentum 0.9, or Adam."""
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    momentum = 0.9 if name == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
