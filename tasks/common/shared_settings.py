"""Settings that the jobs share, each written once; a job's dataclass calls these for its fields.

Each function returns a new dataclass field, since a field belongs to one class. They are not the
fields of a base class: those would come before all others in the help and in config.yaml.
"""

from __future__ import annotations

from typing import Any

from tasks.common.flags import setting


def seed_setting() -> Any:
    """The seed of everything that the job draws: a whole number, or None."""
    text = "repeats a run exactly, noise included; ε holds only while it is secret"
    return setting(None, text, group="training")


def target_epsilon_setting() -> Any:
    """The ε that the noise is calibrated to: a number, or None."""
    return setting(None, "the ε to end with; the noise follows", group="privacy")


def placement_setting() -> Any:
    """How the noise of a step is spread over the workers."""
    return setting("sharded", "who adds which noise", ("sharded", "per_worker"), "privacy")


def device_setting() -> Any:
    """The device that a worker computes on."""
    return setting("auto", "where to compute", ("auto", "cpu", "cuda"), "machine")


def threads_setting() -> Any:
    """The threads of a worker: a whole number, or None."""
    text = "of each worker; the cores shared among the workers if not given"
    return setting(None, text, group="machine")


def tensorboard_setting() -> Any:
    """Whether TensorBoard scalars are written beside the metrics."""
    return setting(True, "write TensorBoard scalars", group="machine")
