"""What the settings of a run mean, in plain words: for the privacy card."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edpsgd.ledger.events import Event
from edpsgd.ledger.records import BatchesRecord, RunRecord
from edpsgd.ledger.selection import Selection
from edpsgd.mechanism.layer_scales import FirstStepNorms

_LAWS = {1.0: "geometric", 0.0: "logarithmic"}
_SCORES = {
    "public": "a score on public data",
    "noisy": "a score with noise",
    "exact": "an exact score on private data, which ε does not cover",
}


def facts(run: RunRecord, released: Sequence[Event], selection: Selection | None = None) -> dict[str, str]:
    """Sampling, noise, clipping, layer scales, trust, and the choice among others, in plain words."""
    chosen = {} if selection is None else {"Choice": _choice(selection)}
    return {
        **chosen,
        "Sampling": _sampling(run, released),
        "Noise": _noise(run, released),
        "Clipping": _clipping(run),
        "Layer scales": _scales(run),
        "Workers and trust": _trust(run),
    }


def _sampling(run: RunRecord, released: Sequence[Event]) -> str:
    steps = [event for event in released if event.kind == "gradients"]
    if run.batches is None:
        return _sampling_without_sampler(run, steps)
    source = "the sampler vouches for it"
    if any(event.batching == "unvouched" for event in steps):
        source += " in the last run, and nobody for earlier ones"
    if run.unit == "user":
        return _sampling_of_users(run.batches, source)
    return _sampling_of_examples(run.batches, source)


def _sampling_without_sampler(run: RunRecord, steps: Sequence[Event]) -> str:
    """What the user must have seen to, if no sampler of this package made the batches."""
    has_epochs = any(event.epoch is not None for event in steps)
    assumption = "no example is in two micro-batches of " + ("an epoch" if has_epochs else "a step")
    if run.unit == "example":
        assumption = f"every micro-batch is one example, and {assumption}"
    elif run.unit == "micro_batch":
        assumption += ", and that the number of micro-batches in a step, which sets divisor and noise, is no secret"
    text = f"No sampler vouches for the batches: the user's word is that {assumption}."
    if has_epochs:
        return text
    return f"{text} set_epoch was not called, so every step counts as if all examples were in it."


def _sampling_of_examples(batches: BatchesRecord, source: str) -> str:
    """How examples were drawn; ``source`` says who knows."""
    per_step = batches.micro_batches
    split = "every example a micro-batch of its own" if per_step is None else f"{per_step} micro-batches per worker"
    sizes = f"{batches.examples} examples, {batches.steps_per_epoch} steps in an epoch, {split} in a step"
    if batches.kind == "poisson":
        rate = batches.sampling_rate or math.nan
        drawn = "; worker and micro-batch are drawn for each example too" if batches.slots == "drawn" else ""
        return (
            f"Poisson: every example joins every step with probability {rate:.6g}, independently of all others; "
            f"{source}. {sizes}{drawn}."
        )
    return (
        f"Shuffled: every example is in one step of an epoch, in a new order each time; {source}. "
        f"{sizes}, of {batches.batch_size} examples each."
    )


def _sampling_of_users(batches: BatchesRecord, source: str) -> str:
    """How users were drawn; ``source`` says who knows."""
    users = batches.examples
    if batches.kind == "poisson":
        rate = batches.sampling_rate or math.nan
        drawn = f"Poisson: every one of {users} users joins every round with probability {rate:.6g}, independently"
    else:
        drawn = f"Rounds of a fixed size: {batches.cohort} of {users} users, drawn without replacement"
    return f"{drawn}; {source}. A user's weight is {batches.weights}; {batches.denominator}."


def _noise(run: RunRecord, released: Sequence[Event]) -> str:
    real = [event.noise_multiplier for event in released if event.kind == "gradients"]
    given = f"Multiplier {_known(run.noise_multiplier)} in epoch 0, decay: {_decay(run)}."
    accounted = f" Accounted: {short(real[0])} first, {short(real[-1])} last." if real else ""
    if run.noise == "paper":
        largest = "" if run.clipping == "per_layer" else "·max α"
        return (
            f'{given} noise="paper": the published algorithm as printed, whose noise is weaker than its multiplier '
            f"says. ε is computed from the real multiplier, z/(2·√(N·K){largest}).{accounted}"
        )
    return f"{given} Calibrated: each step is a Gaussian mechanism with the accounted multiplier.{accounted}"


def _decay(run: RunRecord) -> str:
    return f"`{run.noise_decay}`" if run.noise_decay else "none"


def _clipping(run: RunRecord) -> str:
    kind = {"flat": "flat, all layers together", "per_layer": "each layer by itself"}.get(run.clipping or "")
    each = {
        "micro_batch": "The average gradient of a micro-batch is clipped, and one example can move it across the ball",
        "example": "The gradient of every example is clipped by itself",
        "user": "The update of every user is clipped by itself",
    }.get(run.unit or "", "What is clipped was not recorded")
    divisor = f" The sum is divided by {run.divisor}, a public number." if run.divisor else ""
    rounded = f" Gradients travel as {run.compression}." if run.compression else ""
    return (
        f"Norm {_known(run.clip_norm)}, {kind or 'kind not recorded'}. {each}: "
        f"sensitivity {_known(run.sensitivity)}.{divisor}{rounded}"
    )


def _scales(run: RunRecord) -> str:
    scaling = run.layer_scaling
    if scaling is None:
        return "None: all layers alike."
    if run.has_raw_scales:
        return "Raw norms of the first private gradients: a release that no noise covers, and not in ε."
    if isinstance(scaling, FirstStepNorms):
        multiplier = f"with noise multiplier {scaling.noise_multiplier}"
        return f"Measured privately in the first step, {multiplier}; their cost is in ε."
    spread = f"between {short(min(scaling.values()))} and {short(max(scaling.values()))}" if scaling else ""
    return f"Given by the user for {len(scaling)} layers, {spread}: they must come from public knowledge."


def _trust(run: RunRecord) -> str:
    workers, placement = run.workers, run.noise_placement
    if workers == 1:
        return "One worker, which adds all the noise. Whoever runs it sees the data and is trusted."
    who = f"{_known(run.workers)} workers, noise placement {placement or 'not recorded'}."
    if run.batches is not None and run.batches.follows_draw:
        who += " Each tells the others the exact weight of the users that it drew, which no noise covers on the way."
    if placement == "sharded":
        return (
            f"{who} Each worker noises its own share of the coordinates. ε holds for the sum: whoever sees the message "
            "of one worker before the sum sees bare the coordinates that this worker does not noise, and workers who "
            "collude know all the noise on their shares. The workers and the network between them are trusted."
        )
    if placement == "per_worker":
        return (
            f"{who} Each of the N workers adds its part of the noise to all coordinates. ε holds for the sum: a single "
            "message before the sum is protected with the accounted multiplier over √N only, and c workers who collude "
            "know c/N of the noise variance."
        )
    return who


def _choice(selection: Selection) -> str:
    drawn = f"a random number of them, {short(selection.mean)} on average"
    law = _LAWS.get(selection.shape, f"negative binomial, shape {short(selection.shape)}")
    score = f"It was chosen by {_SCORES[selection.score]}"
    if selection.score_noise is not None:
        score += f", of multiplier {short(selection.score_noise)}; its cost is in ε"
    if selection.held_out:
        score += ": an example is in a training or in the score, and pays for one of the two"
    several = len(selection.candidates)
    settings = f" Each drew its noise and steps from {several} plans; the dearest counts." if several > 1 else ""
    return f"The best training of {drawn} ({law}), of which nothing else is released. {score}.{settings}"


def _known(value: object) -> str:
    return "not recorded" if value is None else short(value)


def short(value: object) -> str:
    """A value as text; a float with six digits at most."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
