"""How a job draws its batches, how much noise it needs, and what that will cost: before the first step."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass

import edpsgd
from edpsgd import accounting
from edpsgd.distributed.collectives import Collective
from edpsgd.ledger.events import Event
from edpsgd.ledger.guarantee import Report, format_epsilon, report
from edpsgd.ledger.records import BatchesRecord, RunRecord
from edpsgd.sampling.base import Batches
from edpsgd.schedules import Decay, parse_decay
from tasks.config import Config


def make_batches(config: Config, data: int | Sized, collective: Collective) -> Batches:
    """The sampler of a job. Single examples are drawn as many as a micro-batch would hold.

    Given the data and not only their number, it compares their order between the workers.
    """
    examples = data if isinstance(data, int) else len(data)
    size, number = config.batch_size, config.micro_batches
    together = config.private == "edp" and config.in_one_pass
    if config.sampling == "poisson" and config.private != "off":
        rate = collective.size * size * number / examples
        if rate > 1:
            raise ValueError(
                f"a step takes {collective.size * size * number} utterances ({collective.size} workers x micro_batches "
                f"{number} x batch_size {size}), and there are {examples} to draw from: choose a smaller batch_size"
            )
        unit = "example" if config.private == "example" else "micro_batch"
        return edpsgd.PoissonBatches(
            data,
            rate,
            unit=unit,
            micro_batches=number,
            together=together,
            collective=collective,
            seed=config.seed,
        )
    if config.private == "example":
        size, number = 1, size
    return edpsgd.ShuffledBatches(
        data, size, micro_batches=number, together=together, collective=collective, seed=config.seed
    )


def layer_scaling(config: Config) -> edpsgd.FirstStepNorms | None:
    """What --layer-scaling says."""
    kind, _, number = config.layer_scaling.partition(":")
    if config.layer_scaling == "none":
        return None
    if config.layer_scaling == "raw":
        return edpsgd.FirstStepNorms()
    try:
        if kind == "private" and float(number) > 0:
            return edpsgd.FirstStepNorms(noise_multiplier=float(number))
    except ValueError:
        pass
    raise ValueError(f"layer_scaling must be none, private:Z with Z > 0, or raw, got {config.layer_scaling!r}")


@dataclass(frozen=True)
class Plan:
    """The noise of a private job and its cost.

    Attributes:
        noise_multiplier: z of the first epoch.
        decay: of the noise, by epochs.
        epochs: all of them.
        steps: of an epoch.
        report: ε by every method; None if it hangs on scales that are still to be measured.
    """

    noise_multiplier: float
    decay: Decay | None
    epochs: int
    steps: int
    report: Report | None

    def lines(self, delta: float) -> list[str]:
        """The plan, to print."""
        last = self.noise_multiplier * accounting.decay_factors(self.epochs, self.decay)[-1]
        lines = [
            f"  steps             {self.steps} in an epoch, {self.epochs} epochs",
            f"  noise multiplier  {self.noise_multiplier:.6g} in the first epoch, {last:.6g} in the last",
        ]
        if self.report is None:
            return [*lines, "  ε                 known when the layer scales are measured: noise=paper depends on them"]
        bounds = self.report.bounds
        rows = [f"{format_epsilon(b.epsilon)} at δ = {delta:g} ({b.method}; {b.neighbours})" for b in bounds]
        lines += [f"  {'ε' if i == 0 else ' '}                 {row}" for i, row in enumerate(rows)]
        return [*lines, *(f"  * on condition: {text}" for text in bounds[0].conditions)]


def make_plan(config: Config, batches: Batches, workers: int) -> Plan:
    """Calibrates the noise if an ε is asked for, and says what the whole training will cost."""
    decay, scaling = parse_decay(config.decay), layer_scaling(config)
    measured = [] if scaling is None else [scaling.noise_multiplier or 0.0]
    z0 = config.noise_multiplier
    if config.epsilon is not None:
        z0 = accounting.calibrate(
            config.epsilon, config.delta, config.epochs, decay, *_sampling(batches), also=measured
        )
    if z0 is None:
        raise ValueError("epsilon or noise_multiplier must be given")
    return Plan(
        z0, decay, config.epochs, batches.steps_per_epoch, _forecast(config, batches, workers, z0, decay, measured)
    )


def _sampling(batches: Batches) -> tuple[float | None, int | None]:
    return (None, None) if batches.sampling_rate is None else (batches.sampling_rate, batches.steps_per_epoch)


def _forecast(
    config: Config, batches: Batches, workers: int, z0: float, decay: Decay | None, measured: list[float]
) -> Report | None:
    share = 1.0
    if config.noise == "paper":
        if config.layer_scaling != "none" and config.clipping == "flat":
            return None
        share = 1 / (2 * math.sqrt(workers * config.micro_batches))  # privacy.md, section 3
    z = [z0 * share * factor for factor in accounting.decay_factors(config.epochs, decay)]
    steps, kind, rate = batches.steps_per_epoch, batches.kind, batches.sampling_rate
    first = [Event("layer_norms", None, value, steps=1) for value in measured]
    rest = [Event("gradients", epoch, value, steps, kind, rate) for epoch, value in enumerate(z)]
    run = RunRecord(
        unit="example" if config.private == "example" else "micro_batch",
        one_pass=config.in_one_pass,
        seeded=config.seed is not None,
        batches=BatchesRecord.from_settings(batches.describe()),
    )
    return report([*first, *rest], config.delta, [run])
