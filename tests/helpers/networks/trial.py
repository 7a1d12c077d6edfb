"""Many batches through one engine, each held against a loop of plain autograd over its units."""

from __future__ import annotations

import linecache
import random
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

import edpsgd
from edpsgd.mechanism import clipping
from edpsgd.per_example import UnitGradients
from tests.helpers.networks.batches import Batch
from tests.helpers.networks.network import Network, Plan, make_plan
from tests.helpers.unit_loop import gradients_of, trained

VERDICTS = ("right", "wrong", "stopped", "crashed", "broken")
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
_BY_OPTIMIZER = 2e-3  # which makes its norms in single precision
_WAKES = 3  # the batch before which weights that began at zero are so no longer


@dataclass
class Outcome:
    """How an engine fared with a network.

    Attributes:
        plan: of the network.
        batches: how many were compared.
        wrong: those that were not what the loop says: number, and what differs.
        farthest: how far the clipped sum was moved by one unit at most, in clip norms, in wrong batches.
        stopped: the error with which the engine refused a sound batch.
        crashed: any other exception, with where it came from.
        broken: an exception before the engine's turn, which says nothing about the engine.
        slow: kinds of operations with parameters that were computed unit by unit.
    """

    plan: Plan
    batches: int = 0
    wrong: list[tuple[int, str]] = field(default_factory=list)
    farthest: float = 0.0
    stopped: str = ""
    crashed: str = ""
    broken: str = ""
    slow: set[str] = field(default_factory=set)

    @property
    def verdict(self) -> str:
        """The worst of VERDICTS."""
        found = (self.broken, self.wrong, self.crashed, self.stopped)
        names = ("broken", "wrong", "crashed", "stopped")
        return next((name for name, what in zip(names, found, strict=True) if what), "right")

    def __str__(self) -> str:
        lines = [str(self.plan)]
        for number, what in self.wrong:
            lines.append(f"  WRONG in batch {number} of {self.plan.batches[number][0]}: {what}")
        for title, what in (("STOPPED", self.stopped), ("CRASHED", self.crashed), ("BROKEN", self.broken)):
            if what:
                lines.append(f"  {title} in batch {self.batches} of {self.plan.batches[self.batches][0]}: {what}")
        if self.slow:
            lines.append(f"  slow: {', '.join(sorted(self.slow))}")
        return "\n".join(lines)


def run(plan: Plan) -> Outcome:
    """All batches of a plan, until something is raised."""
    outcome = Outcome(plan)
    with _predictable(plan.seed), torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        network = Network(plan)
        if not trained(network):
            return outcome
        through = ByOptimizer(network) if plan.by_optimizer else ByEngine(network)
        for number, batch in enumerate(plan.data()):
            if number == _WAKES:
                network.wake()
            losses = network(batch)
            right = Loop(network, losses, batch)
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                try:
                    found = through.clipped(losses, batch, right.clip_norm)
                except Exception as error:
                    _note_error(outcome, error)
                    break
                finally:
                    outcome.slow |= _slow_kinds(network, [str(one.message) for one in heard])
            outcome.batches += 1
            what = right.differs(found)
            if what:
                outcome.wrong.append((number, what))
                outcome.farthest = max(outcome.farthest, right.farthest(found.sums))
    return outcome


@dataclass
class Found:
    """Clipped sums for each layer, and norms, units x layers, where they are known."""

    sums: list[torch.Tensor]
    norms: torch.Tensor | None
    tolerance: float


class ByEngine:
    """UnitGradients alone."""

    def __init__(self, network: Network) -> None:
        self._parameters = trained(network)
        self._engine = UnitGradients(self._parameters)
        self._plan, self._tolerance = network.plan, _TOLERANCE[network.plan.dtype]

    def clipped(self, losses: torch.Tensor, batch: Batch, clip_norm: float) -> Found:
        norms = self._engine.backward(losses, batch.units, batch.count)
        sums = [torch.zeros_like(p, requires_grad=False) for p in self._parameters.values()]
        self._engine.add_weighted_(sums, _factors(self._plan, norms, clip_norm))
        self._engine.release()
        return Found(sums, norms, self._tolerance)


class ByOptimizer:
    """A PrivateOptimizer without noise: how far a step with a rate of 1 moves the parameters is the sum."""

    def __init__(self, network: Network) -> None:
        self._parameters = trained(network)
        self._optimizer = edpsgd.PrivateOptimizer(
            torch.optim.SGD(network.parameters(), lr=1.0),
            network.named_parameters(),
            clip_norm=1.0,
            noise_multiplier=0.0,
            clipping="per_layer" if network.plan.per_layer else "flat",
            collective="local",
        )

    def clipped(self, losses: torch.Tensor, batch: Batch, clip_norm: float) -> Found:
        before = [p.detach().clone() for p in self._parameters.values()]
        units = torch.arange(batch.examples) if batch.units is None else batch.units
        self._optimizer.clip_norm = clip_norm
        self._optimizer.backward(losses, units, batch.count)
        self._optimizer.step()
        with torch.no_grad():
            pairs = list(zip(before, self._parameters.values(), strict=True))
            moved = [batch.count * (old - new) for old, new in pairs]
            for old, new in pairs:
                new.copy_(old)
        return Found(moved, None, _BY_OPTIMIZER)


class Loop:
    """What plain autograd says, one unit at a time."""

    def __init__(self, network: Network, losses: torch.Tensor, batch: Batch) -> None:
        parameters = list(trained(network).values())
        units = torch.arange(batch.examples) if batch.units is None else batch.units
        found = gradients_of(losses, parameters, units, batch.count)
        self._gradients = [[one.double() for one in unit] for unit in found]
        self.norms = torch.tensor([[float(one.norm()) for one in unit] for unit in self._gradients])
        whole = self.norms.norm(dim=1)
        usual = float(whole[whole > 0].median()) if bool((whole > 0).any()) else 1.0
        self.clip_norm = float(f"{usual:.3g}")
        factors = _factors(network.plan, self.norms, self.clip_norm)
        self._factors = (factors if factors.dim() == 2 else factors.unsqueeze(1).expand_as(self.norms)).tolist()

    def _sum(self, without: int | None = None) -> list[torch.Tensor]:
        kept = [unit for unit in range(len(self._gradients)) if unit != without]
        sums = [torch.zeros_like(one) for one in self._gradients[0]]
        for layer, total in enumerate(sums):
            for unit in kept:
                total += self._factors[unit][layer] * self._gradients[unit][layer]
        return sums

    def differs(self, found: Found) -> str:
        """In what, or nothing."""
        off = _distance(found.sums, self._sum()) / self.clip_norm
        if not off <= found.tolerance * len(self._gradients):
            return f"the clipped sum is off by {off:.3g} C"
        if found.norms is None:
            return ""
        allowed = found.tolerance * (self.norms.norm(dim=1, keepdim=True) + self.clip_norm)
        wrong = ~((found.norms - self.norms).abs() <= allowed)
        if not bool(wrong.any()):
            return ""
        unit, layer = wrong.nonzero()[0].tolist()
        said, is_so = float(found.norms[unit, layer]), float(self.norms[unit, layer])
        return f"the norm of unit {unit} in layer {layer} is {is_so:.6g}, not {said:.6g}"

    def farthest(self, sums: Sequence[torch.Tensor]) -> float:
        """How far the sum is from the right one without a unit, of whichever that is most; in clip norms."""
        units = range(len(self._gradients))
        return max(_distance(sums, self._sum(unit)) for unit in units) / self.clip_norm


def _factors(plan: Plan, norms: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What units are multiplied by, or units x layers."""
    clip = clipping.per_layer_factors if plan.per_layer else clipping.flat_factor
    return clip(norms, clip_norm, None)


def _distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return float(sum(float((one.double() - other).square().sum()) for one, other in pairs)) ** 0.5


def _note_error(outcome: Outcome, error: Exception) -> None:
    """An error that edpsgd raises by itself is a stop; any other one a crash."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/edpsgd/" in frame.filename]
    last, line = frames[-1], linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if own and last is own[-1] and line.startswith("raise"):
        outcome.stopped = told
    else:
        where = own[-1] if own else last
        outcome.crashed = f"{told} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"


def _slow_kinds(network: Network, messages: Sequence[str]) -> set[str]:
    """The operations whose parameters a warning names."""
    slow = set()
    for message in messages:
        for part in message.replace(",", " ").split() if "slow" in message else ():
            names = part.split(".")
            if part.startswith("operations.") and names[1].isdigit():
                slow.add(getattr(network.operations[int(names[1])], "kind", part))
            elif part.startswith("begin."):
                slow.add(network.plan.begin)
            elif part.startswith("losses."):
                slow.add(network.plan.losses)
    return slow


@contextmanager
def _predictable(seed: int) -> Iterator[None]:
    """What the engine draws by chance is the same each time, so that a seed repeats it."""
    chance = random.Random(f"engine {seed}")
    with (
        mock.patch("secrets.randbelow", chance.randrange),
        mock.patch("secrets.SystemRandom", return_value=chance),
    ):
        yield


def first_failure(seeds: Iterable[int]) -> Outcome | None:
    """Of the first network that the engine fails on; None if it is right in all of them."""
    return next((one for seed in seeds if (one := run(make_plan(seed))).verdict != "right"), None)


def shrunk(outcome: Outcome) -> Outcome:
    """The same failure with as few operations and batches as it takes.

    Args:
        outcome: of a network that failed. It is kept as it is where no part of the network fails in the same way,
            and if the engine does not do the same each time.
    """
    is_smaller = outcome.verdict != "right"
    while is_smaller:
        is_smaller, plan = False, outcome.plan
        parts = [plan.without(place) for place in reversed(range(len(plan.operations)))]
        parts += [plan.without_batch(place) for place in reversed(range(len(plan.batches)))]
        for part in parts:
            tried = run(part)
            if tried.verdict == outcome.verdict:
                outcome, is_smaller = tried, True
                break
    return outcome
