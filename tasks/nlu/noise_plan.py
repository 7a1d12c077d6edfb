"""How much noise a job needs, and what it will cost: before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import edpsgd
from edpsgd import accounting
from edpsgd.ledger.events import Event
from edpsgd.ledger.guarantee import Report, format_epsilon, report
from edpsgd.ledger.records import BatchesRecord, RunRecord
from edpsgd.ledger.selection import Selection
from edpsgd.mechanism import sensitivity
from edpsgd.sampling.base import Batches
from edpsgd.schedules import Decay, parse_decay
from tasks.nlu.configuration import Config


def layer_scaling(config: Config) -> edpsgd.FirstStepNorms | None:
    """What --layer-scaling says; None for none, and without a multiplier for raw."""
    kind, _, number = config.layer_scaling.partition(":")
    if config.layer_scaling == "none":
        return None
    if config.layer_scaling == "raw":
        return edpsgd.FirstStepNorms()
    try:
        if kind == "private" and float(number) > 0:
            return edpsgd.FirstStepNorms(noise_multiplier=float(number))
    except ValueError:
        pass  # Z is no number
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
        selection: if the job is one of a random number, of which the best is released.
    """

    noise_multiplier: float
    decay: Decay | None
    epochs: int
    steps: int
    report: Report | None
    selection: Selection | None = None

    def lines(self, delta: float) -> list[str]:
        """The plan, to print."""
        last = self.noise_multiplier * accounting.decay_factors(self.epochs, self.decay)[-1]
        lines = [
            f"  steps             {self.steps} in an epoch, {self.epochs} epochs",
            f"  noise multiplier  {self.noise_multiplier:.6g} in the first epoch, {last:.6g} in the last",
        ]
        if self.report is None:
            return [*lines, "  ε                 known when the layer scales are measured: noise=paper depends on them"]
        for number, bound in enumerate(self.report.bounds):
            name = "ε" if number == 0 else " "
            epsilon = format_epsilon(bound.epsilon)
            means = f"({bound.method}; {bound.neighbours})"
            lines.append(f"  {name}                 {epsilon} at δ = {delta:g} {means}")
        lines += [f"  * on condition: {text}" for text in self.report.bounds[0].conditions]
        return lines


def make_plan(config: Config, batches: Batches, workers: int, selection: Selection | None = None) -> Plan:
    """Calibrates the noise if an ε is asked for, and says what the whole training will cost.

    One of several trainings has its noise from their tuning.
    """
    decay, scaling = parse_decay(config.decay), layer_scaling(config)
    # The noise multipliers of measurements of layer norms: one, or none without scaling.
    measured = [] if scaling is None else [scaling.noise_multiplier or 0.0]
    multiplier = config.noise_multiplier
    if config.epsilon is not None:
        multiplier = _calibrated(config.epsilon, config, batches, decay, measured)
    if multiplier is None:
        raise ValueError("epsilon or noise_multiplier must be given")
    forecast = _forecast(config, batches, workers, multiplier, decay, measured, selection)
    return Plan(multiplier, decay, config.epochs, batches.steps_per_epoch, forecast, selection)


def _calibrated(epsilon: float, config: Config, batches: Batches, decay: Decay | None, measured: list[float]) -> float:
    """The noise multiplier of the first epoch with which the whole training costs that ε."""
    rate = batches.sampling_rate
    return accounting.calibrate(
        epsilon,
        config.delta,
        config.epochs,
        decay,
        sampling_rate=rate,
        steps_per_epoch=None if rate is None else batches.steps_per_epoch,
        also=measured,
    )


def _forecast(
    config: Config,
    batches: Batches,
    workers: int,
    multiplier: float,
    decay: Decay | None,
    measured: list[float],
    selection: Selection | None,
) -> Report | None:
    """ε of the ledger that the training will leave; None if scales yet to be measured decide it."""
    if config.noise == "paper":
        if config.layer_scaling != "none" and config.clipping == "flat":
            return None
        # The published algorithm adds less noise than its multiplier says.
        multiplier *= sensitivity.paper_multiplier(1.0, workers, config.micro_batches)
    steps = batches.steps_per_epoch
    events = [Event("layer_norms", None, z, steps=1) for z in measured]
    for epoch, factor in enumerate(accounting.decay_factors(config.epochs, decay)):
        z = multiplier * factor
        events.append(Event("gradients", epoch, z, steps, batches.kind, batches.sampling_rate))
    run = RunRecord(
        unit="example" if config.private == "example" else "micro_batch",
        one_pass=config.in_one_pass,
        seeded=config.seed is not None,
        batches=BatchesRecord.from_settings(batches.describe()),
        selection=selection,
    )
    return report(events, config.delta, [run])
