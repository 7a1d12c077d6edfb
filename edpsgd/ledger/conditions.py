"""Every condition of ε, worded once: what nobody has checked, and when it applies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from edpsgd.ledger.events import Event

_NOTHING = "no step is recorded: it says nothing of a training that took its steps elsewhere"
_RAW_SCALES = "the layer scales are raw first-step norms: a release of private data that no noise covers, and not in ε"
_SEEDED = (
    "the noise comes from a given seed: it holds only while the seed is secret, and is used for no other run and for "
    "no step that was run again"
)
_ONE_PASS = (
    "examples were clipped in one backward pass, which is compared with autograd on some batches only: it holds if the "
    "others were right too, and no loss depends on other examples"
)
_VERIFIED = (
    "examples were clipped in one backward pass, and every batch was compared with autograd: it holds if no error is "
    "hidden by the rounding of both, and no loss depends on other examples"
)
_SHARED_ROWS = (
    "gradients of several examples reach the same rows of some layers, and check_losses was not run: it holds if those "
    "rows do not depend on the data"
)
_UNCOMPARED = (
    "NaN or infinities of some examples kept autograd from the comparison of some layers in some batches: it holds if "
    "the gradients of the others were right there too"
)
_WRONG = "gradients of single examples were found to be wrong: it does not hold for the steps before"
_ORDER = "micro-batches came together: it holds if the losses are in the order in which the sampler drew their examples"
_SCALED = (
    "a GradScaler follows the micro-batches that were discarded, which no noise covers: it holds if none was "
    "discarded, or if the scale does not change"
)
_ROUNDED = (
    "messages are rounded on the wire before they are summed: it holds as far as the noise of a single worker is much "
    "larger than that"
)
_SEEDED_SAMPLING = (
    "the batches come from a given seed: it holds only while the seed is secret, and is used for no other run and for "
    "no step that was run again"
)
_ORDER_OF_WORKERS = (
    "the sampler could not compare the data of the workers: it holds if all of them have the same ones in the same "
    "order. It compares examples, if it is given the data set instead of a number"
)
_FOLLOWED = (
    "clip_norm was changed after clip_fraction was read, or may have been by some worker, which no noise covers: it "
    "holds if the change does not follow from what was read"
)


def is_raw_scales(event: Event) -> bool:
    """Whether the event is a release of layer scales without noise."""
    return event.kind == "layer_norms" and event.noise_multiplier == 0


def has_single_examples(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any of the runs clipped single examples."""
    return any(run.get("unit") == "example" for run in runs)


def _is_clip_norm_followed(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the clip norm changed after the share of clipped units was read, or may have been.

    Each worker reads its own share, and tells the others with the next step only. So with several workers nobody knows
    what came first, nor what was read after the last step.
    """
    used = [run for run, following in itertools.pairwise([*runs, {}]) if not _is_unused(run, following)]
    was_read = False
    for before, run in itertools.pairwise(used):
        has_others = max(before.get("workers", 1), run.get("workers", 1)) > 1
        was_read = was_read or has_others or bool(before.get("clip_fraction_read"))
        if was_read and run.get("clip_norm") != before.get("clip_norm"):
            return True
    return False


def _is_unused(run: Mapping[str, Any], following: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with another clip norm was loaded before the run took a step."""
    return bool(following.get("clip_norm_restored")) and not run.get("clip_norm_restored")


def _is_order_unknown(run: Mapping[str, Any]) -> bool:
    """Whether a sampler shared examples out to several workers that may have them in different orders."""
    batches = run.get("batches")
    return batches is not None and run.get("workers", 1) > 1 and not batches.get("order_compared")


def conditions_of(events: Sequence[Event], runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """All conditions under which ε of these events holds, in the order in which they are printed."""
    unvouched = [e for e in events if e.batching == "unvouched" and e.kind == "gradients" and e.steps]
    conditions = {
        _NOTHING: not any(e.steps for e in events),
        _RAW_SCALES: any(is_raw_scales(e) for e in events),
        _word(any(e.epoch is not None for e in unvouched), runs): bool(unvouched),
        _WRONG: any(run.get("wrong_gradients") for run in runs),
        _ONE_PASS: any(run.get("one_pass") and run.get("verify") != "always" for run in runs),
        _VERIFIED: any(run.get("one_pass") and run.get("verify") == "always" for run in runs),
        _UNCOMPARED: any(run.get("uncompared") for run in runs),
        _SHARED_ROWS: any(run.get("shared_rows") for run in runs),
        _ORDER: any(run.get("one_pass") and (run.get("batches") or {}).get("together") for run in runs),
        _ORDER_OF_WORKERS: any(_is_order_unknown(run) for run in runs),
        _FOLLOWED: _is_clip_norm_followed(runs),
        _SCALED: any(run.get("loss_scaling") for run in runs),
        _ROUNDED: any(run.get("compression") for run in runs),
        _SEEDED: any(run.get("seeded") for run in runs),
        _SEEDED_SAMPLING: any(
            (run.get("batches") or {}).get("seeded") and run["batches"]["kind"] != "shuffled" for run in runs
        ),
    }
    return tuple(text for text, applies in conditions.items() if applies)


def _word(has_epochs: bool, runs: Sequence[Mapping[str, Any]]) -> str:
    """What nobody but the user knows of batches that no sampler made; without epochs every step is a pass."""
    alone = "every micro-batch held one example, " if has_single_examples(runs) else ""
    where = "an epoch, of one step or of several," if has_epochs else "a step"
    numbers = "the number of steps does not"
    if any(run.get("unit") == "micro_batch" for run in runs):  # then it is the divisor too, and sets the noise
        numbers = (
            "neither the number of steps nor that of micro-batches in a step (which backward() takes from `units`, "
            "if not from `count`) does"
        )
    return (
        f"no sampler vouches for the batches: it holds if {alone}no example was in two micro-batches of {where} and "
        f"{numbers} depend on the data"
    )
