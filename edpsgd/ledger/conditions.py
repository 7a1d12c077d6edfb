"""Every condition of ε and every "not covered" of this library, worded once: what nobody has checked, and when.

The two tables at the end hold each sentence with the fields of the record, or the events, that it
depends on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edpsgd.ledger.events import Event
from edpsgd.ledger.records import RunRecord

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
_CHOSEN = (
    "the training is the best of a random number of them: it holds if that number and all of the others stay with the "
    "trainer, and none was left out, cut off or run again for what it showed"
)
_PUBLIC_SCORE = "the best training was chosen by a score on data that are said to be public: it holds if they are"
_NOISY_SCORE = (
    "the best training was chosen by a noisy score: it holds if one example moves the score by no more than its noise "
    "is for"
)
_HELD_OUT_SCORE = (
    "the best training was chosen by a noisy score on examples that none used: it holds if one of them moves the score "
    "by no more than its noise is for, and if an example alone decides whether it is one, which replacing it must not "
    "change"
)
_EXACT_SCORE = (
    "the choice is not covered: the best training was chosen by an exact score on private data, and of the examples "
    "that were scored ε says nothing"
)
_RAW_RELEASE = "the layer scales: raw norms of the first private gradients, released without noise"
_KNOWN_SEED = "anybody who knows the seed of the noise: to them the noise is no protection"
_KNOWN_DRAWS = "anybody who knows the seed of the random draws: to them the sampling is no protection"
_METRICS = "the metrics in this card, as far as they were measured on private data"
_OTHER_RUNS = "other training runs on the same data: tuning, the choice of hyper-parameters, early stopping"
_OUTSIDE_TUNING = (
    "trainings on the same data outside this tuning, also those that its settings were chosen by, and early stopping"
)
_OTHERS_OF_TUNING = "the other trainings of the tuning: their number, scores, logs and models, to whoever sees them"
_EXACT_CHOICE = "the choice among the trainings of the tuning, as far as the examples of its exact score are concerned"
_LABELS = "vocabulary and label sets, if they were read from private text"
_LOGS = "training loss, clip fraction and discard counts, if anybody but the trainer sees the logs"
_BUFFERS = "buffers that move in the forward pass, such as BatchNorm statistics (edpsgd.check_model refuses them)"


@dataclass(frozen=True)
class History:
    """What conditions depend on.

    Attributes:
        events: what was released.
        runs: the records of the runs that released it.
        has_metrics: whether numbers are shown beside ε that no noise covers.
    """

    events: Sequence[Event]
    runs: Sequence[RunRecord]
    has_metrics: bool = False


@dataclass(frozen=True)
class Statement:
    """A sentence about ε.

    Attributes:
        text: the sentence, or what words it.
        applies: whether it must be said of a history.
    """

    text: str | Callable[[History], str]
    applies: Callable[[History], bool]

    def worded(self, history: History) -> str:
        """The sentence for a history."""
        return self.text if isinstance(self.text, str) else self.text(history)


def conditions_of(events: Sequence[Event], runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """All conditions under which ε of these events holds, as sentences in the order of printing."""
    return _worded(CONDITIONS, History(events, runs))


def not_covered(history: History) -> tuple[str, ...]:
    """All that ε says nothing about, as sentences in the order of printing (privacy.md section 11)."""
    return _worded(NOT_COVERED, history)


def _worded(table: Sequence[Statement], history: History) -> tuple[str, ...]:
    """The statements of a table that must be made of a history, in words."""
    return tuple(statement.worded(history) for statement in table if statement.applies(history))


def is_raw_scales(event: Event) -> bool:
    """Whether the event is a release of layer scales without noise."""
    return event.kind == "layer_norms" and event.noise_multiplier == 0


def has_single_examples(runs: Sequence[RunRecord]) -> bool:
    """Whether any of the runs clipped single examples."""
    return any(run.unit == "example" for run in runs)


# -------------------------------------------------------------------- when they apply


def _always(history: History) -> bool:
    return True


def _in_any_run(test: Callable[[RunRecord], bool | None]) -> Callable[[History], bool]:
    """The test of a history: whether a run passes the given one; what is true of one run is said of all."""
    return lambda history: any(test(run) for run in history.runs)


def _is_nothing_recorded(history: History) -> bool:
    return not any(event.steps for event in history.events)


def _are_scales_raw(history: History) -> bool:
    return any(is_raw_scales(event) for event in history.events)


def _are_raw_scales_released(history: History) -> bool:
    return _are_scales_raw(history) or any(run.has_raw_scales for run in history.runs)


def _events_without_sampler(history: History) -> list[Event]:
    """The steps whose batches no sampler made."""
    gradients = [event for event in history.events if event.kind == "gradients" and event.steps]
    return [event for event in gradients if event.batching == "unvouched"]


def _has_events_without_sampler(history: History) -> bool:
    return bool(_events_without_sampler(history))


def _condition_without_sampler(history: History) -> str:
    """What nobody but the user knows of batches that no sampler made; without epochs every step is a pass."""
    alone = "every micro-batch held one example, " if has_single_examples(history.runs) else ""
    has_epochs = any(event.epoch is not None for event in _events_without_sampler(history))
    where = "an epoch, of one step or of several," if has_epochs else "a step"
    numbers = "the number of steps does not"
    if any(run.unit == "micro_batch" for run in history.runs):  # then it is the divisor too, and sets the noise
        numbers = (
            "neither the number of steps nor that of micro-batches in a step (which backward() takes from `units`, "
            "if not from `count`) does"
        )
    return (
        f"no sampler vouches for the batches: it holds if {alone}no example was in two micro-batches of {where} and "
        f"{numbers} depend on the data"
    )


def _is_order_of_losses_open(run: RunRecord) -> bool | None:
    """Whether nobody has checked that losses of batches that came together are in the sampler's order."""
    return run.one_pass and run.batches is not None and run.batches.together


def _is_order_of_workers_open(run: RunRecord) -> bool:
    """Whether a sampler shared examples out to workers that may have them in different orders."""
    return run.batches is not None and run.has_several_workers and not run.batches.order_compared


def _are_draws_seeded(run: RunRecord) -> bool | None:
    """A shuffle is no secret in the accounting; any other sampler's draws are."""
    return run.batches is not None and run.batches.kind != "shuffled" and run.batches.seeded


def _is_chosen(run: RunRecord) -> bool:
    """Whether the run is one of several, of which the best is released."""
    return run.selection is not None


def _is_chosen_by(score: str, held_out: bool = False) -> Callable[[RunRecord], bool]:
    """The test of a run: whether it was chosen by such a score."""

    def test(run: RunRecord) -> bool:
        selection = run.selection
        return selection is not None and (selection.score, selection.held_out) == (score, held_out)

    return test


def _is_clip_norm_followed(history: History) -> bool:
    """Whether the clip norm changed after the share of clipped units was read, or may have been.

    Each worker reads its own share, and tells the others with the next step only. So with several workers nobody knows
    what came first, nor what was read after the last step.
    """
    runs_with_next = itertools.pairwise([*history.runs, RunRecord()])
    used = [run for run, following in runs_with_next if not _is_unused(run, following)]
    may_be_read = False
    for before, run in itertools.pairwise(used):
        has_others = before.has_several_workers or run.has_several_workers
        may_be_read = may_be_read or has_others or before.clip_fraction_read
        if may_be_read and run.clip_norm != before.clip_norm:
            return True
    return False


def _is_unused(run: RunRecord, following: RunRecord) -> bool:
    """Whether a checkpoint with another clip norm was loaded before the run took a step."""
    return following.clip_norm_restored and not run.clip_norm_restored


# -------------------------------------------------------------------- the tables

CONDITIONS = (
    Statement(_NOTHING, _is_nothing_recorded),
    Statement(_RAW_SCALES, _are_scales_raw),
    Statement(_condition_without_sampler, _has_events_without_sampler),
    Statement(_WRONG, _in_any_run(lambda run: run.wrong_gradients)),
    Statement(_ONE_PASS, _in_any_run(lambda run: run.one_pass and run.verify != "always")),
    Statement(_VERIFIED, _in_any_run(lambda run: run.one_pass and run.verify == "always")),
    Statement(_UNCOMPARED, _in_any_run(lambda run: run.uncompared)),
    Statement(_SHARED_ROWS, _in_any_run(lambda run: run.shared_rows)),
    Statement(_ORDER, _in_any_run(_is_order_of_losses_open)),
    Statement(_ORDER_OF_WORKERS, _in_any_run(_is_order_of_workers_open)),
    Statement(_FOLLOWED, _is_clip_norm_followed),
    Statement(_SCALED, _in_any_run(lambda run: run.loss_scaling)),
    Statement(_ROUNDED, _in_any_run(lambda run: bool(run.compression))),
    Statement(_SEEDED, _in_any_run(lambda run: run.seeded)),
    Statement(_SEEDED_SAMPLING, _in_any_run(_are_draws_seeded)),
    Statement(_CHOSEN, _in_any_run(_is_chosen)),
    Statement(_PUBLIC_SCORE, _in_any_run(_is_chosen_by("public"))),
    Statement(_NOISY_SCORE, _in_any_run(_is_chosen_by("noisy"))),
    Statement(_HELD_OUT_SCORE, _in_any_run(_is_chosen_by("noisy", held_out=True))),
    Statement(_EXACT_SCORE, _in_any_run(_is_chosen_by("exact"))),
)
NOT_COVERED = (
    Statement(_RAW_RELEASE, _are_raw_scales_released),
    Statement(_KNOWN_SEED, _in_any_run(lambda run: run.seeded)),
    Statement(_KNOWN_DRAWS, _in_any_run(_are_draws_seeded)),
    Statement(_METRICS, lambda history: history.has_metrics),
    Statement(_OTHERS_OF_TUNING, _in_any_run(_is_chosen)),
    Statement(_EXACT_CHOICE, _in_any_run(_is_chosen_by("exact"))),
    Statement(_OUTSIDE_TUNING, _in_any_run(_is_chosen)),
    Statement(_OTHER_RUNS, lambda history: not any(map(_is_chosen, history.runs))),
    Statement(_LABELS, _always),
    Statement(_LOGS, _always),
    Statement(_BUFFERS, _always),
)
