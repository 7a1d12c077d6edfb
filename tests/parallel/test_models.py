"""Models that per-example libraries refuse, unchanged: without clipping and noise they train as plain torch does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchcrf import CRF
from transformers import BertConfig, BertForTokenClassification

from tests.helpers.common import layers_of, private

WORDS, TAGS = 40, 5


class Tagger(nn.Module):
    """A bidirectional LSTM with a CRF."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(12, TAGS)
        self.crf = CRF(TAGS, batch_first=True)

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return -self.crf(self.out(self.lstm(self.embed(words))[0]), tags, reduction="mean")


class TiedLanguageModel(nn.Module):
    """Input and output embeddings are one tensor, and a parameter stands loose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, WORDS, bias=False)
        self.out.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.gru(self.embed(words))[0]) * self.temperature
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = BertForTokenClassification(BertConfig(vocab_size=WORDS, num_labels=TAGS, **sizes, **dropout))

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=words, labels=tags).loss


def batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(0, WORDS, (4, 7), generator=generator), torch.randint(0, TAGS, (4, 7), generator=generator)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("kind", [Tagger, TiedLanguageModel, Bert])
def test_trains_as_plain_torch_does(workers, kind) -> None:
    model, plain = build(kind), build(kind)
    optimizer = private(model, torch.optim.Adam(model.parameters(), lr=0.01), clip_norm=1e6, noise_multiplier=0.0)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        model(*batch(step, workers.rank)).backward()
        optimizer.step()
        reference.zero_grad()
        torch.stack([plain(*batch(step, index)) for index in range(workers.size)]).mean().backward()
        reference.step()
    for name, parameter in layers_of(model).items():
        torch.testing.assert_close(parameter, layers_of(plain)[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [Tagger, TiedLanguageModel, Bert])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_private_training_keeps_workers_alike(workers, kind, clipping) -> None:
    model = build(kind).float()
    before = layers_of(model)
    optimizer = private(model, torch.optim.Adam(model.parameters(), lr=0.001), clipping=clipping, noise_multiplier=0.5)
    optimizer.set_epoch(0)
    for step in range(3):
        optimizer.zero_grad()
        model(*batch(step, workers.rank)).backward()
        optimizer.step()
    first = workers.gather(layers_of(model))[0]
    for name, parameter in layers_of(model).items():
        assert torch.equal(parameter, first[name])
        assert not torch.equal(parameter, before[name])
        assert torch.isfinite(parameter).all()
    assert optimizer.ledger.events[0].steps == 3
