"""Attention, in both layouts, by torch's modules and by hand."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.networks.batches import LONGEST, Batch
from tests.helpers.networks.operations import Make, Operation, operation

HEADS = 2


class Attention(Operation):
    """Residual, with what attends to what given by ``attend``."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.size = make.width // HEADS
        self.project, self.out = nn.Linear(make.width, 3 * make.width), nn.Linear(make.width, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        return x + self.out(self.attend(*self.project(x).chunk(3, dim=-1), batch))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        raise NotImplementedError


class TorchAttention(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        first = self.layout == "batch"
        self.layer = nn.MultiheadAttention(make.width, HEADS, batch_first=first)
        self.is_masked, self.is_seen = make.chance(), make.chance(0.3)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        padding = ~batch.mask if self.is_masked else None
        return x + self.layer(x, x, x, key_padding_mask=padding, need_weights=self.is_seen)[0]


@operation("torch attention, batch first", "batch")
class BatchFirst(TorchAttention):
    pass


@operation("torch attention, time first", "time")
class TimeFirst(TorchAttention):
    pass


@operation("scaled dot product attention", "batch")
class ScaledDotProduct(Attention):
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        heads = [one.unflatten(2, (HEADS, -1)).transpose(1, 2) for one in (query, key, value)]
        mask = batch.mask[:, None, None, :]
        found = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return found.transpose(1, 2).flatten(2)


@operation("causal attention", "batch")
class Causal(Attention):
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@operation("einsum attention, batch first", "batch")
class EinsumBatchFirst(Attention):
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        query, key, value = (one.unflatten(2, (HEADS, -1)) for one in (query, key, value))
        scores = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(self.size)
        scores = scores.masked_fill(~batch.mask[:, None, None, :], -math.inf)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value).flatten(2)


@operation("einsum attention, time first", "time")
class EinsumTimeFirst(Attention):
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        query, key, value = (one.unflatten(2, (HEADS, -1)) for one in (query, key, value))
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key) / math.sqrt(self.size)
        scores = scores.masked_fill(~batch.mask.t()[None, :, :, None], -1e9)
        return torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), value).flatten(2)


@operation("attention of heads beside examples", "time")
class HeadsBesideExamples(Attention):
    """The old way: (T, B·heads, d) transposed, and products of batches of matrices."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        tokens, rows = batch.tokens, batch.examples * HEADS
        query, key, value = (
            one.contiguous().view(tokens, rows, self.size).transpose(0, 1) for one in (query, key, value)
        )
        weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)
        found = torch.bmm(weights, value).transpose(0, 1)
        return found.contiguous().view(tokens, batch.examples, self.width)


@operation("relative positions", "batch")
class Relative(Attention):
    """A bias for each distance and head, which all examples share."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.bias = nn.Embedding(2 * LONGEST - 1, HEADS)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        tokens = torch.arange(batch.tokens)
        bias = self.bias(tokens.unsqueeze(0) - tokens.unsqueeze(1) + LONGEST - 1).permute(2, 0, 1)
        heads = [one.unflatten(2, (HEADS, -1)).transpose(1, 2) for one in (query, key, value)]
        scores = heads[0] @ heads[1].transpose(2, 3) + bias
        return (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)


@operation("transformer layer")
class Transformer(Operation):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        norm_first = make.chance()
        self.layer = nn.TransformerEncoderLayer(make.width, HEADS, 8, 0.0, norm_first=norm_first)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        self.layer.self_attn.batch_first = dim == 0
        return self.layer(x, src_key_padding_mask=~batch.mask)


@operation("attention to learned keys")
class LearnedKeys(Operation):
    """Keys and values are parameters: as many as there are labels."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.keys, self.values = nn.Embedding(3, make.width), nn.Embedding(3, make.width)

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        labels = torch.arange(3)
        return x + (x @ self.keys(labels).t()).softmax(-1) @ self.values(labels)
