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
from edpsgd import accounting, card
from edpsgd.bounds import format_epsilon

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
LENGTH, EXAMPLES, EPOCHS = 8, 12_288, 12
RATE, K = 1 / 48, 16  # each utterance joins a step with this probability; micro-batches of a worker in a step
EPSILON, DELTA, DECAY = 3.0, 1e-5, edpsgd.LinearDecay(0.1)


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


def train(noise: float, folder: Path | None) -> tuple[float, float, edpsgd.PrivateOptimizer]:
    """One training; returns test accuracy, seconds and the optimizer. With a folder it has a budget and a ledger."""
    torch.manual_seed(0)
    model = Classifier()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    words, intents = generate(EXAMPLES, seed=1)
    test = generate(4_000, seed=2)
    batches = edpsgd.PoissonBatches(EXAMPLES, RATE, micro_batches=K)
    private = {} if folder is None else {"budget": edpsgd.Budget(EPSILON, DELTA), "ledger": folder / "ledger.jsonl"}
    optimizer = edpsgd.PrivateOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.05),
        model.named_parameters(),
        clip_norm=1.0,
        noise_multiplier=noise,
        noise_decay=DECAY,
        batches=batches,
        **private,
    )
    start = time.perf_counter()
    for epoch in range(EPOCHS):
        optimizer.set_epoch(epoch)
        for number, rows in enumerate(batches, 1):
            if rows:
                nn.functional.cross_entropy(model(words[rows]), intents[rows]).backward()
            if number % K:
                optimizer.accumulate()
            else:
                optimizer.step()
        cost = f"ε {format_epsilon(float(optimizer.epsilon(DELTA))):6}   " if folder else ""
        say(
            f"  epoch {epoch + 1:2d}/{EPOCHS}   {cost}test accuracy {accuracy(model, *test):5.1f} %   "
            f"{time.perf_counter() - start:4.1f} s"
        )
    return accuracy(model, *test), time.perf_counter() - start, optimizer


def main() -> None:
    """Plans the noise, trains with it and without, and prints what came of it."""
    hvd.init()
    torch.set_num_threads(1)
    folder = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    if hvd.rank() == 0:
        folder.mkdir(parents=True)
    steps = round(1 / RATE)
    noise = accounting.calibrate(EPSILON, DELTA, EPOCHS, DECAY, sampling_rate=RATE, steps_per_epoch=steps)
    say(f"eDP-SGD on {hvd.size()} Horovod workers: {EXAMPLES} utterances, {EPOCHS} epochs of {steps} steps")
    say(f"ε = {EPSILON:g} at δ = {DELTA:g} needs a noise multiplier of {noise:.3f} in the first epoch")
    private_accuracy, private_seconds, optimizer = train(noise, folder)
    say("the same without noise")
    plain_accuracy, plain_seconds, _ = train(0.0, None)
    say()
    say("                 test accuracy      time")
    say(f"  private             {private_accuracy:5.1f} %   {private_seconds:5.1f} s")
    say(f"  without noise       {plain_accuracy:5.1f} %   {plain_seconds:5.1f} s")
    say()
    if hvd.rank() == 0:
        say(card.write(folder, optimizer.ledger, DELTA, {"test accuracy": round(private_accuracy, 1)}).markdown())
    say(f"ledger and card: {folder}")


if __name__ == "__main__":
    main()
