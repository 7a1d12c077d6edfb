"""Models whose losses depend on other examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.padded_models import LABELS, WIDTH, Model, masked_mean

MIXING: dict[str, Callable[[], Model]] = {}


def mixing(make: type[Model]) -> type[Model]:
    MIXING[make.__name__] = make
    return make


@mixing
class MeanOverPadding(Model):
    def encode(self, tokens, mask, lengths):
        return self.words(tokens).mean(1)


@mixing
class BranchOnLongest(Model):
    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        return pooled * 3 if tokens.shape[1] > 6 else pooled


@mixing
class BatchStatistics(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def encode(self, tokens, mask, lengths):
        return masked_mean(self.norm(self.words(tokens).transpose(1, 2)).transpose(1, 2), mask)


@mixing
class PooledBatchStatistics(BatchStatistics):
    """Torch itself refuses a single example here."""

    def encode(self, tokens, mask, lengths):
        return self.norm(masked_mean(self.words(tokens), mask))


@mixing
class FunctionalBatchStatistics(Model):
    def encode(self, tokens, mask, lengths):
        hidden = functional.batch_norm(self.words(tokens).transpose(1, 2), None, None, training=True)
        return masked_mean(hidden.transpose(1, 2), mask)


@mixing
class DetachedMean(Model):
    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        return pooled - pooled.mean(0).detach()


@mixing
class DetachedKeys(Model):
    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        return torch.softmax(pooled @ pooled.detach().T, 1) @ pooled.detach() + pooled


@mixing
class InBatchNegatives(Model):
    def losses(self, scores, labels):
        places = torch.arange(len(scores))
        return functional.cross_entropy(scores @ (scores * 0.5 + 0.1).T, places, reduction="none")


@mixing
class MaxOverPadding(Model):
    def encode(self, tokens, mask, lengths):
        return self.words(tokens).max(1).values


@mixing
class UnpackedBiLSTM(Model):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)

    def encode(self, tokens, mask, lengths):
        return masked_mean(self.lstm(self.words(tokens))[0], mask)


@mixing
class HardestHalf(Model):
    def losses(self, scores, labels):
        losses = super().losses(scores, labels)
        return losses * (losses >= losses.median())


@mixing
class HardestHalfOfMany(Model):
    """Zero in half of the batch, and as it is when alone."""

    def losses(self, scores, labels):
        losses = super().losses(scores, labels)
        kept = torch.zeros_like(losses)
        kept[losses.topk((len(losses) + 1) // 2).indices] = 1.0
        return losses * kept


@mixing
class ClassWeights(Model):
    def losses(self, scores, labels):
        weights = len(labels) / torch.bincount(labels, minlength=LABELS).clamp(min=1)
        return functional.cross_entropy(scores, labels, weight=weights, reduction="none")


@mixing
class TokensOfBatch(Model):
    def forward(self, examples):
        tokens = sum(len(tokens) for tokens, _ in examples)
        lengths = torch.tensor([len(tokens) for tokens, _ in examples])
        return super().forward(examples) * lengths / (tokens / len(examples))


@mixing
class MixUp(Model):
    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        share = float(np.random.beta(1.0, 1.0))
        return share * pooled + (1 - share) * pooled[torch.randperm(len(pooled))]


@mixing
class RareMixUp(MixUp):
    """In two thirds of the batches only."""

    def encode(self, tokens, mask, lengths):
        if torch.rand(()) < 2 / 3:
            return super().encode(tokens, mask, lengths)
        return masked_mean(self.words(tokens), mask)


@mixing
class UnmaskedAttention(Model):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def encode(self, tokens, mask, lengths):
        hidden = self.words(tokens)
        return masked_mean(self.attention(hidden, hidden, hidden)[0], mask)


@mixing
class AttentionOverBatch(Model):
    """Time-first attention that is told to be batch-first."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def encode(self, tokens, mask, lengths):
        hidden = self.words(tokens)
        return masked_mean(self.attention(hidden, hidden, hidden)[0], mask)


@mixing
class StateInAttribute(Model):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        shifted = pooled - self.mean
        self.mean = 0.9 * self.mean + 0.1 * pooled.detach().mean(0)
        return shifted


@mixing
class StateInPlace(StateInAttribute):
    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        shifted = pooled - self.mean
        self.mean.data.mul_(0.9).add_(0.1 * pooled.detach().mean(0))
        return shifted


@mixing
class QueueOfKeys(Model):
    def __init__(self):
        super().__init__()
        self.memory = {"keys": deque(maxlen=16)}

    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        keys = torch.stack([*self.memory["keys"]]) if self.memory["keys"] else torch.zeros(1, WIDTH)
        self.memory["keys"].extend(pooled.detach())
        return pooled + torch.softmax(pooled @ keys.T, 1) @ keys


@mixing
class FirstBatchKept(Model):
    """What the first batch was like is used for ever, so that no later call shows a change."""

    def __init__(self):
        super().__init__()
        self.centre = None

    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        if self.centre is None:
            self.centre = pooled.detach().mean(0)
        return pooled - self.centre


class _MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.3 * gradient.roll(1, 0) if len(gradient) > 1 else gradient


@mixing
class GradientsMixed(Model):
    """Every loss is its own, its gradient is not."""

    def encode(self, tokens, mask, lengths):
        return _MixedBackward.apply(masked_mean(self.words(tokens), mask))


@mixing
class MixedWhereSquare(Model):
    """Takes the wrong dimension for the examples if there are as many as tokens."""

    def encode(self, tokens, mask, lengths):
        hidden = self.words(tokens) * mask.unsqueeze(2)
        hidden = hidden.transpose(0, 1) if hidden.shape[0] == hidden.shape[1] else hidden
        return hidden.sum(1)
