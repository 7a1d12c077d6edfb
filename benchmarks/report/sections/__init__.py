"""The sections of the report and of pages: what each shows of its results."""

from __future__ import annotations

from benchmarks.report.blocks import Section
from benchmarks.report.sections import attacks, audits, costs, recipes, times, tradeoffs, utility

SECTIONS = (
    Section("Time of an epoch", "epoch_time", times.epoch_time),
    Section("Peers and memory", "epoch_time", times.peers),
    Section("More workers", "epoch_time", times.more_workers),
    Section("Time of a step", "step_time", times.step_time),
    Section("Noise, errors and attacks", "tradeoff", tradeoffs.tradeoff),
    Section("What an ε costs", "tradeoff", tradeoffs.frontier),
    Section("Small ε", "recipes", recipes.recipes),
    Section("Error rates on the real corpora", "utility", utility.utility),
    Section("Audits", "audits", audits.audits),
    Section("Membership", "membership", attacks.membership),
    Section("Membership at small ε", "lira", attacks.lira),
    Section("Memorised phrases", "memorization", attacks.memorization),
    Section("The rank of a canary", "exposure", attacks.exposure),
    Section("The features of an attack", "attack_cost", attacks.attack_cost),
    Section("Time and accuracy of the accountant", "accounting", costs.accounting),
    Section("Data in training", "data_loading", costs.data_loading),
    Section("Everything in small", "bench", costs.bench),
)
