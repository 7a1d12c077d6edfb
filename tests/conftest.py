"""The order of the test files: those that take longest first, so that all processes end together."""

from __future__ import annotations

import pytest

from tests.helpers.paths import ROOT

# More than ten seconds of processor time each, the longest first. The others follow as collected.
LONGEST_FIRST = (
    "tests/test_launchers.py",
    "tests/tasks/test_resume.py",
    "tests/packaging/test_wheel.py",
    "tests/benchmarks/test_recipes.py",
    "tests/test_readme.py",
    "tests/mia/test_attack.py",
    "tests/benchmarks/report/test_browser.py",
    "tests/tasks/nlu/test_training_loop.py",
    "tests/edpsgd/per_example/test_random_networks.py",
    "tests/edpsgd/test_crashes.py",
    "tests/mia/test_example_worlds.py",
    "tests/edpsgd/mechanism/test_cost.py",
    "tests/edpsgd/accounting/test_pld.py",
    "tests/benchmarks/test_memorization.py",
    "tests/benchmarks/report/test_render.py",
    "tests/edpsgd/validation/test_losses.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files only: the tests of a file stay together and in their order."""
    places = {ROOT / path: place for place, path in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
