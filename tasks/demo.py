"""A private fine-tune on two workers, on generated utterances: `make demo`.

A small intent classifier, trained with eDP-SGD and then once more without privacy, to see what it costs.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import edpsgd

PATTERNS = {
    "call": ["call {name}", "ring {name} at {number}", "call my parents at {number}", "phone {name} now"],
    "message": ["text {name} that i am late", "send a message to {name}", "write {name} a note", "tell {name} hello"],
    "refill": ["refill my {drug}", "order more {drug} please", "renew my {drug} prescription", "i am out of {drug}"],
    "remind": ["remind me to take {drug}", "set a reminder at {number}", "wake me at {number}", "alarm for {number}"],
    "play": ["play {title}", "watch {title} tonight", "put on {title}", "start my favorite movie {title}"],
    "pause": ["pause {title}", "stop the movie", "stop {title} now", "hold on for a moment"],
}
FILLERS = {
    "name": ["anna", "omar", "lena", "raj", "mei", "john", "sofia", "ivan"],
    "drug": ["aspirin", "insulin", "ibuprofen", "statin", "codeine"],
    "title": ["casablanca", "alien", "amelie", "metropolis", "vertigo"],
    "number": [f"{digits:04d}" for digits in range(123, 9999, 617)],
}
INTENTS = list(PATTERNS)
WORDS = sorted(
    {w for ps in PATTERNS.values() for p in ps for w in p.split()} | {w for f in FILLERS.values() for w in f}
)
LENGTH, MICRO_BATCH, K, EPOCHS = 8, 8, 16, 12


def generate(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Utterances as word numbers (0 fills up), and their intents."""
    rng, number = random.Random(seed), {word: index for index, word in enumerate(WORDS, 1)}
    words, intents = torch.zeros(count, LENGTH, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    for row in range(count):
        intents[row] = intent = rng.randrange(len(INTENTS))
        text = rng.choice(PATTERNS[INTENTS[intent]]).format(**{slot: rng.choice(f) for slot, f in FILLERS.items()})
        for column, word in enumerate(text.split()):
            words[row, column] = number[word]
    return words, intents


class Classifier(nn.Module):
    """The mean of the word vectors, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(len(WORDS) + 1, 16, padding_idx=0)
        self.intent = nn.Linear(16, len(INTENTS))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the intents."""
        return self.intent(self.words(words))


def accuracy(model: nn.Module, words: torch.Tensor, intents: torch.Tensor) -> float:
    """Share of right answers, in percent."""
    with torch.no_grad():
        return 100.0 * (model(words).argmax(1) == intents).float().mean().item()


def say(text: str = "") -> None:
    """Prints on worker 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def train(private: bool, ledger: Path) -> tuple[float, float, torch.optim.Optimizer]:
    """One training; returns test accuracy, seconds and the optimizer."""
    torch.manual_seed(0)
    model = Classifier()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    words, intents = (part[hvd.rank() :: hvd.size()] for part in generate(12_288, seed=1))  # a fixed share each
    test = generate(4_000, seed=2)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    settings = {"noise_decay": edpsgd.LinearDecay(0.1), "ledger": ledger} if private else {}
    optimizer = edpsgd.PrivateOptimizer(
        optimizer, model.named_parameters(), clip_norm=1.0, noise_multiplier=0.8 if private else 0.0, **settings
    )
    start = time.perf_counter()
    for epoch in range(EPOCHS):
        optimizer.set_epoch(epoch)
        steps = torch.randperm(len(words)).view(-1, K, MICRO_BATCH)  # every example once, the same number of steps
        for micro_batches in steps:
            for rows in micro_batches:
                nn.functional.cross_entropy(model(words[rows]), intents[rows]).backward()
                optimizer.accumulate()
            optimizer.step()
        noise = optimizer.ledger.events[-1].noise_multiplier
        say(
            f"  epoch {epoch + 1:2d}/{EPOCHS}   noise multiplier {noise:.3f}   "
            f"test accuracy {accuracy(model, *test):5.1f} %   {time.perf_counter() - start:4.1f} s"
        )
    return accuracy(model, *test), time.perf_counter() - start, optimizer


def main() -> None:
    """Trains privately and not, and prints what came of it."""
    hvd.init()
    torch.set_num_threads(1)
    folder = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    if hvd.rank() == 0:
        folder.mkdir(parents=True)
    say(f"eDP-SGD on {hvd.size()} Horovod workers, {K} micro-batches of {MICRO_BATCH} utterances each per step")
    private_accuracy, private_seconds, optimizer = train(private=True, ledger=folder / "ledger.jsonl")
    say("the same without noise")
    plain_accuracy, plain_seconds, _ = train(private=False, ledger=folder / "unused")
    events = optimizer.ledger.events
    say()
    say("                 test accuracy      time")
    say(f"  private             {private_accuracy:5.1f} %   {private_seconds:5.1f} s")
    say(f"  without noise       {plain_accuracy:5.1f} %   {plain_seconds:5.1f} s")
    say()
    say(f"ledger: {folder / 'ledger.jsonl'}")
    say(f"  {sum(e.steps for e in events)} steps in {len(events)} passes over the data, clip norm 1.0, sharded noise")
    say(f"  noise multiplier from {events[0].noise_multiplier:.3f} down to {events[-1].noise_multiplier:.3f}")
    say("  protects one utterance; that none is in two steps of a pass is the script's word (batching: unvouched)")


if __name__ == "__main__":
    main()
