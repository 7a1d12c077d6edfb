"""Sections on attacks: membership, memorised phrases, and what attacks cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.harness.published import ATTACK_AUCS
from benchmarks.harness.rows.attack_cost import AttackCost, AttackCostRow
from benchmarks.harness.rows.exposure import CanaryRank, Exposure
from benchmarks.harness.rows.lira import Lira, LiraPiece
from benchmarks.harness.rows.membership import AttackedRun, AttackReport, Membership
from benchmarks.harness.rows.memorization import Memorization, MemorizationRow
from benchmarks.harness.settings import OVERFITTED, RANK_SECONDS, SHADOWS
from benchmarks.report.blocks import Block, Table, Text, epsilon, interval, number, place
from benchmarks.report.conditions import ONE_PASS, SECRET, SECRET_HERE
from benchmarks.report.drawing import shown
from mia.secret_sharer import SUFFIXES

# ---------------------------------------------------------------- membership

_ABOUT_CORPORA = (
    "The trainings are those of `benchmarks.utility`, the shadow is the plain one on SNIPS (for SNIPS: on ATIS). "
    "Utterances that differ in slot values only are left out, and the trainings are short: both may be why CLC's AUCs "
    "are below the paper's, which was not looked into. One seed each; the error rates are in utility.md, and trainings "
    "whose SER is within 5 % of plain training's do not always have a lower AUC."
)


class OfAttack(NamedTuple):
    """A line of a table: one attack on one model."""

    model: str
    attack: str
    report: AttackReport


def membership(found: Membership) -> Iterator[Block]:
    """Who was in the data."""
    brackets = f"Brackets are {_intervals(found)}; near duplicates of members and non-members are left out."
    yield Table[OfAttack](
        "All attacks on a model that knows its utterances by heart, and on one that never saw them: CLC, "
        f"{OVERFITTED.examples} generated utterances, {OVERFITTED.epochs} epochs, no dropout; LiRA and RMIA with "
        f"{SHADOWS} shadow models. {brackets}",
        [OfAttack(name, attack, one) for name, attacks in found["by_heart"].items() for attack, one in attacks.items()],
        {
            "model": lambda row: row.model,
            "attack": lambda row: row.attack,
            "AUC": lambda row: interval(row.report["auc"]),
            "balanced accuracy": lambda row: interval(row.report["balanced_accuracy"]),
            "TPR at 1 % FPR": lambda row: interval(row.report["tpr_at_1_percent"]),
        },
    )
    yield Table[AttackedRun](
        f"The paper's attack on trainings of `benchmarks.utility`. {brackets}",
        found["corpora"],
        {
            "model, corpus": place,
            "noise": lambda one: one["noise"] if _is_private(one) else "none",
            "decay": lambda one: one["decay"].replace(":", ", τ = ") if _is_private(one) else "–",
            "z": lambda one: f"{one['noise_multiplier']:g}" if _is_private(one) else "–",
            "AUC": lambda one: interval(one["auc"]),
            "paper's AUC": _published_auc,
            "balanced accuracy": lambda one: interval(one["balanced_accuracy"]),
            "TPR at 1 % FPR": lambda one: interval(one["tpr_at_1_percent"]),
        },
    )
    yield Text(_ABOUT_CORPORA)


def _intervals(found: Membership) -> str:
    """What the brackets are: older figures, before evaluate() paid for its choices, have a bootstrap's."""
    by_heart = [report for attacks in found["by_heart"].values() for report in attacks.values()]
    if any("resamples" in report for report in [*by_heart, *found["corpora"]]):
        return "95 % bootstrap intervals, too short for balanced accuracy and TPR, whose thresholds were not paid for"
    return "95 % intervals for any law of the scores"


def _is_private(one: AttackedRun) -> bool:
    return one["private"] != "off"


def _published_auc(one: AttackedRun) -> str:
    """The paper attacked plain training, too; its private rows are in Table 1."""
    return "–" if _is_private(one) else number(ATTACK_AUCS[one["model"], one["task"]] / 100, 3)


def lira(found: Lira) -> Iterator[Block]:
    """Whether small ε are seen by an attacker with many shadows."""
    not_complete = "" if found["is_complete"] else " Not complete: attacks are missing, or are on an older recipe."
    shadows = ", ".join(str(number) for number in dict.fromkeys(row["shadows"] for row in found["rows"]))
    yield Table[LiraPiece](
        f"LiRA with {shadows} shadow models on {found['title']}, at δ = {found['delta']:g}; ε is for adding or "
        f"removing one utterance, {SECRET_HERE}, and {ONE_PASS}. Brackets are 95 % intervals for these targets and "
        f"shadows. As many members as held-out utterances, near duplicates of each other left out.{not_complete}",
        found["rows"],
        {
            "trained with": lambda row: "no privacy" if row["epsilon"] is None else f"ε = {row['epsilon']:g}",
            "ε": lambda row: epsilon(row["spent"]),
            "AUC": lambda row: interval(row["auc"]),
            "TPR at 1 % FPR": lambda row: interval(row["tpr_at_1_percent"]),
            "members": lambda row: str(row["members"]),
            "others": lambda row: str(row["non_members"]),
            "SER": lambda row: number(row["test_ser"]),
        },
    )


# ---------------------------------------------------------------- memorised phrases

TABLES = {
    1: "SGD and FedAvg, users as they are and IID",
    2: "DP-FedAvg on users as they are",
    4: "other optimizers",
    5: "DP-FedAvg on IID data",
    6: "only clipping",
    7: "as many passes over the data for all",
}
_ABOUT_USERS = (
    "{users} generated users with about {sentences} sentences each, dictionary of {words} words, embeddings of "
    "{dimension}, LSTM of {hidden}; {canaries} canaries of five words. Accuracy and perplexity are on other users, "
    "without canaries. On IID data users are made up, ε is for a made-up user, and a canary is spread over nearly as "
    "many of them as it has insertions: the promise to single users does not cover what hundreds of them say. Exposure "
    "by chance has a median of 1 bit: with DP-FedAvg, no canary is of rank 1 on users as they are, but those of the "
    "largest rates rank well above chance. FedAvg's rate, batch and server were chosen among five settings by the "
    "perplexity on the same test users; those of SGD were not. All algorithms have as many passes over the data, but "
    "for the small cohorts in Tables 1 and 4. FedAvg's server has momentum but where the name says otherwise. One seed "
    "each."
)


def memorization(found: Memorization) -> Iterator[Block]:
    """Canaries in language models."""
    scale = found["scale"]
    canaries, (dimension, hidden) = len(scale["rates"]) * scale["per"], scale["size"]
    by_chance = f"{canaries / (scale['suffixes'] + 1):.1g}"
    titles = "; ".join(f"{number}, {title}" for number, title in TABLES.items())
    yield Text(_ABOUT_USERS.format(**scale, dimension=dimension, hidden=hidden, canaries=canaries))
    yield Table[MemorizationRow](
        f"Of {canaries} canaries among the sentences of {scale['users']} users, how many a language model has "
        f"memorised: those whose last three words are the likeliest among {scale['suffixes']} random ones (by chance "
        f"{by_chance}), and those that beam search finds from the first word. ε is for adding or removing one user, at "
        f"δ = {found['delta']:g}, {SECRET}; on IID data users are made up, and so is the one that it is for. Tables "
        f"are numbered as in Thakkar et al. 2021: {titles}.",
        found["rows"],
        {
            "algorithm": lambda row: row["name"],
            "users": lambda row: "dealt anew (IID)" if row["is_iid"] else "as they are",
            "batch": _batch,
            "steps": lambda row: str(row["steps"]),
            "likeliest": lambda row: str(row["memorised"]["all"]["random_sampling"]),
            "by beam search": lambda row: str(row["memorised"]["all"]["beam_search"]),
            "median exposure, bits": lambda row: number(row["memorised"]["all"]["median_exposure"], 1),
            "accuracy, %": lambda row: number(100 * row["test_accuracy"], 1),
            "perplexity": lambda row: number(row["test_perplexity"], 1),
            "ε": lambda row: epsilon(row.get("epsilon")),
            "in tables": lambda row: ", ".join(map(str, tables_of(row))),
        },
    )


def _batch(row: MemorizationRow) -> str:
    return f"{row['batch']} {'sentences' if row['name'].startswith('SGD') else 'users'}"


def tables_of(row: MemorizationRow) -> list[int]:
    """Where a row stands in the paper; Tables 2 and 5 differ in the data alone."""
    of_other_data = 2 if row["is_iid"] else 5
    return [number for number in row["tables"] if number != of_other_data]


# ---------------------------------------------------------------- what attacks cost


def exposure(found: Exposure) -> Iterator[Block]:
    """The rank of a canary with the language model of full size."""
    suffixes, seconds = found["suffixes"], found["unseen"]["seconds"]
    yield Table[tuple[str, CanaryRank]](
        f"One canary of five words against {suffixes} random suffixes of three words after its first two; the language "
        f"model has {found['parameters'] / 1e6:.2f} M parameters. Threads: {found['threads']}.",
        [("random weights", found["unseen"]), ("has learned the canary by heart", found["learned"])],
        {
            "model": lambda row: row[0],
            "seconds": lambda row: number(row[1]["seconds"], 1),
            "of the processor": lambda row: number(row[1]["processor_seconds"], 1),
            "suffixes in a second": lambda row: number(suffixes / row[1]["seconds"], 0),
            "rank": lambda row: str(row[1]["rank"]),
            "exposure, bits": lambda row: number(row[1]["exposure"]),
        },
    )
    yield Text(
        f"Memory grows by {found['grown'] / 1e6:.0f} MB, for {found['chunk']} suffixes at a time. The aim: {SUFFIXES} "
        f"suffixes in at most {RANK_SECONDS} s on two cores; at this speed they take "
        f"{SUFFIXES * seconds / suffixes:.0f} s."
    )


def attack_cost(found: AttackCost) -> Iterator[Block]:
    """The features of an attack beside plain prediction."""
    yield Table[AttackCostRow](
        f"{found['examples']} generated utterances, models of full size. Prediction is the forward pass and Viterbi; "
        "the features of an attack are the forward pass, the CRF's marginals, losses and sorting. One thread; other "
        "work on the machine slows both alike, so that only the ratio tells something.",
        found["rows"],
        {
            "model": lambda row: shown(row["model"]),
            "tags": lambda row: str(row["tags"]),
            "prediction, seconds": lambda row: number(row["prediction"], 0),
            "features, seconds": lambda row: number(row["features"], 0),
            "ratio": lambda row: number(row["ratio"]),
        },
    )
