"""Models whose losses depend on no other example, though they look as if."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.helpers.mixing_models import UnpackedBiLSTM
from tests.helpers.padded_models import WIDTH, WORDS, Model, masked_mean

SOUND: dict[str, Callable[[], Model]] = {}


def sound(make: type[Model]) -> type[Model]:
    SOUND[make.__name__] = make
    return make


@sound
class Bag(Model):
    pass


@sound
class PackedBiLSTM(UnpackedBiLSTM):
    def encode(self, tokens, mask, lengths):
        packed = pack_padded_sequence(self.words(tokens), lengths, batch_first=True, enforce_sorted=False)
        return masked_mean(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0], mask)


@sound
class LSTMWithDropout(Model):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

    def encode(self, tokens, mask, lengths):
        return masked_mean(self.lstm(self.words(tokens))[0], mask)


@sound
class PackedGRUWithDropout(Model):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, 2, dropout=0.5, bidirectional=True)

    def encode(self, tokens, mask, lengths):
        packed = pack_padded_sequence(self.words(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.gru(packed)[1][-1]


@sound
class TimeFirstGRU(Model):
    def __init__(self):
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH)

    def encode(self, tokens, mask, lengths):
        hidden = self.norm(self.gru(self.norm(self.words(tokens)).transpose(0, 1))[0])
        return hidden[lengths - 1, torch.arange(len(lengths))]


@sound
class TransformerEncoder(Model):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def encode(self, tokens, mask, lengths):
        return masked_mean(self.layers(self.words(tokens), src_key_padding_mask=~mask), mask)


@sound
class AttentionWithDropout(Model):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)

    def encode(self, tokens, mask, lengths):
        hidden = self.words(tokens)
        attended = self.attention(hidden, hidden, hidden, key_padding_mask=~mask, need_weights=True)[0]
        return masked_mean(attended, mask)


@sound
class FunctionalAttention(Model):
    def encode(self, tokens, mask, lengths):
        hidden = self.words(tokens).unsqueeze(1)
        seen = mask[:, None, None, :]
        positional = functional.scaled_dot_product_attention(hidden, hidden, hidden, seen, 0.4)
        named = functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=seen, dropout_p=0.4)
        return masked_mean((positional + named).squeeze(1), mask)


@sound
class Convolution(Model):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def encode(self, tokens, mask, lengths):
        hidden = (self.words(tokens) * mask.unsqueeze(2)).transpose(1, 2)
        return self.convolution(hidden).masked_fill(~mask.unsqueeze(1), -torch.inf).max(2).values


@sound
class RelativePositions(Model):
    """One table for all examples, as in T5: its gradient has rows of all of them."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(21, 1)

    def encode(self, tokens, mask, lengths):
        hidden, places = self.words(tokens), torch.arange(tokens.shape[1])
        bias = self.bias((places[:, None] - places).clamp(-10, 10) + 10).squeeze(2)
        scores = (hidden @ hidden.transpose(1, 2) + bias).masked_fill(~mask.unsqueeze(1), -torch.inf)
        return masked_mean(scores.softmax(2) @ hidden, mask)


@sound
class Experts(Model):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def encode(self, tokens, mask, lengths):
        hidden = self.words(tokens)[mask]
        shares, chosen = self.gate(hidden).softmax(1).max(1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, shares[rows, None] * expert(hidden[rows]))
        sums = hidden.new_zeros(len(mask), WIDTH).index_add(0, mask.nonzero()[:, 0], mixed)
        return sums / lengths.unsqueeze(1)


@sound
class TiedLanguageModel(Model):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, examples):
        tokens = pad_sequence([tokens for tokens, _ in examples], batch_first=True)
        scores = self.lstm(self.words(tokens[:, :-1]))[0] @ self.words.weight.T
        each = functional.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none")
        is_real = (tokens[:, 1:] != 0).float()
        return (each * is_real).sum(1) / is_real.sum(1)


@sound
class GroupNorms(Model):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH)])

    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        return self.norms[1](self.norms[0](pooled.unsqueeze(2)).squeeze(2))


@sound
class InstanceNorm(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True)

    def encode(self, tokens, mask, lengths):
        first = self.words(tokens)[:, :3].transpose(1, 2)  # no padding among them
        return self.norm(first).square().mean(2) + first.mean(2)


@sound
class DropoutEverywhere(Model):
    def __init__(self):
        super().__init__()
        kinds = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d)
        self.drops = nn.ModuleList(kind(0.5) for kind in kinds)

    def encode(self, tokens, mask, lengths):
        hidden = functional.dropout(self.words(tokens), 0.5)
        hidden = torch.dropout(torch.feature_dropout(hidden, 0.3, True), 0.3, True)
        hidden = functional.dropout1d(functional.alpha_dropout(hidden, 0.2, training=True), 0.2)
        hidden = torch.native_dropout(hidden * functional.dropout(torch.ones_like(hidden), inplace=True), 0.3, True)[0]
        for drop in self.drops:
            hidden = drop(hidden)
        return masked_mean(hidden, mask)


class DropPath(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * torch.empty(len(values), 1).bernoulli_(0.5) if self.training else values


@sound
class DroppedPaths(Model):
    def __init__(self):
        super().__init__()
        self.path = DropPath()

    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        return pooled + self.path(pooled.square())


@sound
class DroppedLayer(Model):
    """One draw for a batch, whoever is in it."""

    def encode(self, tokens, mask, lengths):
        pooled = masked_mean(self.words(tokens), mask)
        return pooled.tanh() if torch.rand(()) < 0.5 else pooled


@sound
class EmbeddingBag(Model):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, padding_idx=0)

    def encode(self, tokens, mask, lengths):
        return self.bag(tokens)


@sound
class SparseWords(Model):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)


@sound
class CachedMask(Model):
    """A mask that grows with the longest batch so far is a state, but not one of the data."""

    def __init__(self):
        super().__init__()
        self.causal = torch.ones(1, 1).tril()

    def encode(self, tokens, mask, lengths):
        size = tokens.shape[1]
        if len(self.causal) < size:
            self.causal = torch.ones(size, size).tril()
        return masked_mean(self.causal[:size, :size] @ self.words(tokens), mask)


@sound
class WordDropout(Model):
    def encode(self, tokens, mask, lengths):
        kept = functional.dropout(torch.ones(tokens.shape), 0.3, self.training).unsqueeze(2) > 0
        return masked_mean(self.words(tokens) * kept, mask)


@sound
class SortedByLength(Model):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def encode(self, tokens, mask, lengths):
        order = lengths.argsort(descending=True)
        packed = pack_padded_sequence(self.words(tokens[order]), lengths[order], batch_first=True)
        return self.lstm(packed)[1][0][0][order.argsort()]


@sound
class Doubles(Bag):
    def __init__(self):
        super().__init__()
        self.double()


@sound
class ManyLosses(Model):
    """Tokens as one list under a block mask, as packed sequences are."""

    def encode(self, tokens, mask, lengths):
        hidden, owner = self.words(tokens[mask]), mask.nonzero()[:, 0]
        scores = (hidden @ hidden.T).masked_fill(owner[:, None] != owner, -torch.inf)
        attended = scores.softmax(1) @ hidden
        return hidden.new_zeros(len(tokens), WIDTH).index_add(0, owner, attended)
