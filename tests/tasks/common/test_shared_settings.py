"""Settings that the jobs share: every job offers them, with the same meaning."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields

import pytest

from tasks.common import shared_settings
from tasks.language import configuration as language
from tasks.nlu import configuration as nlu

SHARED = {
    "seed": shared_settings.seed_setting,
    "epsilon": shared_settings.target_epsilon_setting,
    "placement": shared_settings.placement_setting,
    "device": shared_settings.device_setting,
    "threads": shared_settings.threads_setting,
    "tensorboard": shared_settings.tensorboard_setting,
}


def field_named(kind: type, name: str) -> Field:
    return next(item for item in fields(kind) if item.name == name)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("kind", [nlu.Config, language.Config])
def test_every_job_has_the_shared_settings(kind, name) -> None:
    shared, of_job = SHARED[name](), field_named(kind, name)
    assert of_job.default is not MISSING
    assert of_job.default == shared.default
    assert of_job.metadata == shared.metadata


def test_the_place_of_a_run_may_change_and_its_results_may_not() -> None:
    """Only settings of the group "machine" may differ when a run goes on."""
    groups = {name: make().metadata["group"] for name, make in SHARED.items()}
    machine = {name for name, group in groups.items() if group == "machine"}
    assert machine == {"device", "threads", "tensorboard"}


def test_each_call_makes_a_field_of_its_own() -> None:
    assert shared_settings.seed_setting() is not shared_settings.seed_setting()
