"""How networks begin, and how they end: in one loss for each example."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.networks.batches import LABELS, VOCABULARY, Batch
from tests.helpers.networks.operations import Make, parameter

BEGINS: dict[str, type[Begin]] = {}
LOSSES: dict[str, type[Losses]] = {}


class Begin(nn.Module):
    """From a batch to hidden states: (B, T, d), or (T, B, d) if ``dim`` is 1."""

    def __init__(self, make: Make) -> None:
        super().__init__()

    def __init_subclass__(cls, kind: str) -> None:
        BEGINS[kind] = cls

    def forward(self, batch: Batch, dim: int) -> torch.Tensor:
        raise NotImplementedError


class Embedding(Begin, kind="embedding"):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.words = make.words()

    def forward(self, batch: Batch, dim: int) -> torch.Tensor:
        return self.words(batch.words if dim == 0 else batch.words.t())


class OneHot(Begin, kind="one-hot words"):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.weight = parameter(VOCABULARY, make.width)

    def forward(self, batch: Batch, dim: int) -> torch.Tensor:
        words = batch.words if dim == 0 else batch.words.t()
        return F.one_hot(words, VOCABULARY).to(self.weight.dtype) @ self.weight


class Numbers(Begin, kind="numbers"):
    def forward(self, batch: Batch, dim: int) -> torch.Tensor:
        return batch.inputs if dim == 0 else batch.inputs.transpose(0, 1)


class Losses(nn.Module):
    """From hidden states to losses, (B,)."""

    def __init__(self, make: Make) -> None:
        super().__init__()

    def __init_subclass__(cls, kind: str) -> None:
        LOSSES[kind] = cls

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        raise NotImplementedError


class Regression(Losses, kind="mean over time and a number"):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.out, self.is_late = nn.Linear(make.width, 1), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        if self.is_late:
            return (self.out(x).mean((1 - dim, 2)) - batch.targets).square()
        return (self.out(x.mean(1 - dim)).squeeze(1) - batch.targets).square()


class LastToken(Losses, kind="last token and a class"):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.out, self.is_gathered = nn.Linear(make.width, LABELS), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        x = x if dim == 0 else x.transpose(0, 1)
        if self.is_gathered:
            index = (batch.lengths - 1)[:, None, None].expand(-1, 1, x.shape[2])
            last = x.gather(1, index).squeeze(1)
        else:
            last = x[torch.arange(batch.examples), batch.lengths - 1]
        return F.cross_entropy(self.out(last), batch.labels, reduction="none")


class LargestOverTime(Losses, kind="largest over time and a class"):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.out = nn.Linear(make.width, LABELS)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return F.cross_entropy(self.out(x.amax(1 - dim)), batch.labels, reduction="none")


class LanguageModel(Losses, kind="tied language model"):
    """Cross entropy of every token, averaged over those that are not padding."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.words, self.form = make.words(), make.random.randrange(3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        scores = F.linear(x, self.words.weight)
        words = batch.next_words if dim == 0 else batch.next_words.t()
        if self.form == 0:
            each = F.cross_entropy(scores.permute(0, 2, 1), words, reduction="none")
        elif self.form == 1:
            each = F.cross_entropy(scores.flatten(0, 1), words.flatten(), reduction="none").view(words.shape)
        else:
            each = -scores.log_softmax(-1).gather(2, words.unsqueeze(2)).squeeze(2)
        each = each if dim == 0 else each.t()
        return (each * batch.mask).sum(1) / batch.lengths


class TokensSummed(Losses, kind="losses of tokens added to their examples"):
    """Only rows without padding have a loss; index_add brings it to its example."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.out, self.is_scattered = nn.Linear(make.width, LABELS), make.chance()

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        mask = batch.mask if dim == 0 else batch.mask.t()
        owners = torch.arange(batch.examples).unsqueeze(1 - dim).expand(mask.shape)[mask]
        each = F.cross_entropy(self.out(x[mask]), batch.labels[owners], reduction="none")
        zeros = each.new_zeros(batch.examples)
        if self.is_scattered:
            return zeros.scatter_add(0, owners, each)
        return zeros.index_add(0, owners, each)


class Prototypes(Losses, kind="distance to prototypes"):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.prototypes = parameter(LABELS, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        away = (x.mean(1 - dim).unsqueeze(1) - self.prototypes).square().sum(2)
        return F.cross_entropy(-away, batch.labels, reduction="none")


class Dot(Losses, kind="sum of products"):
    """The simplest of all, without an operation that tells where the examples are."""

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        inputs = batch.inputs if dim == 0 else batch.inputs.transpose(0, 1)
        return (x * inputs).sum((1 - dim, 2)) + 0.1 * x.square().mean((1 - dim, 2))
