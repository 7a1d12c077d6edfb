"""Imports of tasks go one way: commands, then nlu and language, then common, models and edpsgd."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

ALLOWED = {  # what the modules of a folder may import of the checkout
    "edpsgd": {"edpsgd"},
    "models": {"edpsgd", "models"},
    "tasks/common": {"edpsgd", "models", "tasks.common"},
    "tasks/nlu": {"edpsgd", "models", "tasks.common", "tasks.nlu"},
    "tasks/language": {"edpsgd", "models", "tasks.common", "tasks.language"},
}
OWN = ("edpsgd", "models", "tasks", "mia", "benchmarks", "tests")
COMMANDS = (
    "demo",
    "embeddings",
    "generate",
    "language_model",
    "predict",
    "schema",
    "synthetic_users",
    "train",
    "tune",
)


def imported(file: Path) -> set[str]:
    """The packages of the checkout that a module imports, those of tasks with their sub-package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(f"{node.module}.{one.name}" for one in node.names)
    found = set()
    for name in names:
        first, *rest = name.split(".")
        if first in OWN:
            found.add(f"tasks.{rest[0]}" if first == "tasks" else first)
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_go_one_way(folder) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        assert imported(file) <= ALLOWED[folder], file


def test_only_commands_lie_beside_the_packages() -> None:
    assert {file.stem for file in (ROOT / "tasks").glob("*.py")} == {*COMMANDS, "__init__"}


def test_commands_import_no_command() -> None:
    for name in COMMANDS:
        found = imported(ROOT / "tasks" / f"{name}.py")
        assert found <= ALLOWED["tasks/nlu"] | ALLOWED["tasks/language"], name
