"""One training of an intent and slot model, from its settings to weights, metrics and card in the run folder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch.utils.data import Dataset, Subset
from transformers.utils import logging

from edpsgd import card, files
from edpsgd.card import Card
from edpsgd.ledger.guarantee import Bound
from edpsgd.ledger.selection import Selection
from models.bert import BERT
from tasks.common import checkpoints, progress, run_opening
from tasks.common.workers import Workers, has_bf16
from tasks.nlu import canaries, earlier_run, encoder_states, new_model, recipes, run_folder
from tasks.nlu.configuration import Config, write_file
from tasks.nlu.corpus import Rows, Utterance
from tasks.nlu.dataset import Data, load
from tasks.nlu.evaluation import evaluate
from tasks.nlu.example_batches import Examples, WordTable
from tasks.nlu.noise_plan import Plan, make_plan
from tasks.nlu.samplers import make_batches
from tasks.nlu.splits import near_duplicates
from tasks.nlu.training_loop import Training


class Prepared(NamedTuple):
    """The parts of a corpus as the model reads them."""

    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        folder: its run folder.
        metrics: on the test set.
        seconds: of training, validation left out.
        epsilon: with its conditions; None for plain training.
        card: the privacy card, on worker 0.
    """

    folder: Path
    metrics: dict[str, float]
    seconds: float
    epsilon: Bound | None
    card: Card | None


@files.private()
def train(
    config: Config,
    team: Workers,
    resume: Path | None = None,
    dry_run: bool = False,
    chosen: Collection[str] | None = None,
    selection: Selection | None = None,
) -> Outcome | None:
    """A whole job.

    Args:
        config: its settings.
        team: who takes part.
        resume: the run folder to go on with; None for a new run.
        dry_run: whether it is only planned.
        chosen: names of the settings that are to stay; all others follow a recipe. None: all stay.
        selection: if the job is one of a random number, of which the best is released; that of one
            that goes on is in its ledger.

    Returns:
        What came of it; None if it is only planned.
    """
    if resume is not None and not dry_run:
        team.on_first(lambda: run_opening.open_again(resume, config.private != "off"))
    if resume is not None and config.private != "off":
        selection = team.collective.gather(team.on_first(lambda: run_opening.selection_of(resume)))[0]
    logging.disable_progress_bar()  # every worker would draw one
    team.together(lambda: _check_precision(config, team))
    seed = team.collective.gather(secrets.randbits(62))[0] if config.seed is None else config.seed
    data = team.together(lambda: load(config, resume, seed))
    if chosen is not None:
        config = recipes.by_recipe(config, chosen, len(data.rows.train), team)
    utterances = Subset(cast("Dataset[Utterance]", data.corpus), data.rows.train.tolist())
    batches = make_batches(config, utterances, team.collective)
    plan = None if config.private == "off" else make_plan(config, batches, team.collective.size, selection)
    _say(team, _summary(config, data, plan, team.collective.size))
    torch.manual_seed(torch.seed() if config.seed is None else config.seed)
    parts = team.together(lambda: _parts(config, data, resume))
    table = parts.inputs.table(data.corpus.words)
    table.check(data.corpus.word_ids, data.corpus.starts)
    examples = _prepare(config, data, parts, table)
    if dry_run:
        return None
    name = f"{config.task}-{config.model}-{config.private}"
    folder = run_opening.new_folder(config.output, name, team) if resume is None else resume
    if resume is None:
        team.on_first(lambda: _begin(folder, config, parts, data, team.collective.size))
    training = Training(config, team, parts, batches, plan, folder)
    training.state.not_covered = [*new_model.not_covered(config, parts.labels), *earlier_run.not_covered(folder)]
    try:
        if resume is not None:
            training.load_checkpoint()
        _use_states(training, data, table, examples)
        training.run(examples.train, examples.validation, data.blanks())
        return _finish(config, team, training, examples.test)
    finally:
        training.close()


def _check_precision(config: Config, team: Workers) -> None:
    if config.precision == "bf16" and not has_bf16(team.device):
        raise ValueError("--precision bf16: this processor has no instructions for it, use fp32")


def _parts(config: Config, data: Data, resume: Path | None) -> run_folder.Parts:
    """A new model; or that of a run folder, whose checkpoint, if there is one, comes later."""
    if resume is None:
        return new_model.build(config, data.corpus, data.without_canaries().train)
    if run_folder.has_ended(resume) and checkpoints.latest(resume / "checkpoints") is None:
        raise ValueError(f"the run {resume} is complete, and its checkpoints are gone: there is nothing to go on with")
    run_folder.check_data(resume, data.rows)
    return run_folder.load_to_train(resume, config)


def _summary(config: Config, data: Data, plan: Plan | None, workers: int) -> str:
    corpus, rows = data.corpus, data.rows
    sizes = ", ".join(f"{len(part)} {name}" for name, part in vars(rows).items())
    plural = "s" if workers > 1 else ""
    lines = [
        f"{config.task}: {len(corpus)} utterances, {config.split} split: {sizes}; "
        f"{corpus.repaired} I- tags read as B-, {corpus.skipped} bad lines skipped, {corpus.left_out} left out",
        f"{config.model} on {workers} worker{plural}, private: {config.private}",
    ]
    if plan is None:
        return "\n".join(lines)
    lines += plan.lines(config.delta)
    expected = recipes.expectation(config, workers)
    if expected is not None:
        lines.append(expected)
    trained = len(rows.train)
    if config.delta * trained > 1:
        share = f"1/{trained}, one over the number of utterances"
        lines.append(f"  note: δ is above {share}: choose a smaller one")
    return "\n".join(lines)


def _prepare(config: Config, data: Data, parts: run_folder.Parts, table: WordTable) -> Prepared:
    def examples(rows: Rows) -> Examples:
        return Examples(data.corpus, rows, table, parts.labels, config.bucket_size)

    rows = data.rows
    return Prepared(examples(rows.train), examples(rows.validation), examples(rows.test))


def _use_states(training: Training, data: Data, table: WordTable, examples: Prepared) -> None:
    """Computes what a frozen encoder says of all utterances, once, and lets the heads read that."""
    model, config = training.model, training.config
    if not (isinstance(model, BERT) and model.has_fixed_encoder):
        return
    states = encoder_states.compute(config, training.workers, training.folder, model, data.corpus, table)
    for part in examples:
        part.states = states
    is_kept = states.file is not None and config.keep_features
    if is_kept and encoder_states.KEPT not in training.state.not_covered:
        training.state.not_covered.append(encoder_states.KEPT)


def _begin(folder: Path, config: Config, parts: run_folder.Parts, data: Data, workers: int) -> None:
    """What stays the same in a run folder, and the initial weights."""
    files.make_private(folder)  # labels and metrics are not for everybody
    parts.save(folder)
    parts.save_weights(folder)
    if config.init_from is not None:
        earlier_run.save(folder, config.init_from)
    overlap = near_duplicates(data.corpus, data.rows)
    sizes = {name: len(part) for name, part in vars(data.rows).items()}
    changed = {name: getattr(data.corpus, name) for name in ("repaired", "skipped", "left_out")}
    facts = {**sizes, **changed, **vars(overlap), "workers": workers}
    print(
        f"near duplicates: {overlap.near_duplicate_share:.1%} of the test utterances have a form that is in the "
        f"training set too, {overlap.exact_duplicate_share:.1%} are in it word for word"
    )
    if data.canaries:
        canaries.save(data.canaries, folder)
    files.write_text(folder / "data.json", json.dumps(facts, indent=1))
    write_file(folder / "config.yaml", config)


def _finish(config: Config, team: Workers, training: Training, test: Examples) -> Outcome:
    """Weights, metrics of the test set, and the card."""
    found = evaluate(training.model, test, training.parts.labels, team.collective, team.device)
    epsilon = None if training.private is None else training.private.epsilon(config.delta)
    written = team.on_first(lambda: _write(config, training, found, epsilon))
    if not config.keep_features:
        team.on_first(lambda: encoder_states.delete(training.folder))
    return Outcome(training.folder, found, training.state.seconds, epsilon, written)


def _write(config: Config, training: Training, found: Mapping[str, float], epsilon: Bound | None) -> Card | None:
    """The metrics of the test set come last: whoever finds them knows that the run is complete."""
    folder, state, written = training.folder, training.state, None
    numbers = {f"test_{name}": value for name, value in found.items()}
    training.parts.save_weights(folder)
    if training.private is not None:
        rounded = {name: round(value, 3) for name, value in numbers.items()}
        written = card.write(folder, training.private.ledger, config.delta, rounded, state.not_covered)
    last = {"step": state.step, "seconds": round(state.seconds, 3), **numbers}
    if epsilon is not None:
        last["epsilon"] = float(epsilon)
    progress.record(folder, last)
    return written


def outcome_table(outcomes: Mapping[str, Outcome]) -> str:
    """Jobs side by side."""
    rows = [f"{'private':<10}{'SER':>8}{'intents':>10}{'slot F1':>10}{'time':>9}   ε"]
    for name, outcome in outcomes.items():
        found = outcome.metrics
        epsilon = "no promise" if outcome.epsilon is None else str(outcome.epsilon)
        rows.append(
            f"{name:<10}{found['ser']:>6.2f} %{found['intent_accuracy']:>8.2f} %{found['slot_f1']:>8.2f} %"
            f"{outcome.seconds:>7.1f} s   {epsilon}"
        )
    return "\n" + "\n".join(rows)


def _say(team: Workers, text: str) -> None:
    if team.is_first:
        print(text, flush=True)
