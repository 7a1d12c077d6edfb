"""Packages point one way: each may import from those before it, and edpsgd from none of the applications."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.paths import ROOT

ORDER = (
    {"_version", "_arguments", "escaping", "files", "schedules", "tensors"},
    {"distributed", "per_example", "validation"},
    {"sampling", "accounting"},
    {"mechanism"},
    {"ledger"},
    {"bookkeeping", "card", "planning"},
    {"agreement", "checkpoints"},
    {"step_message"},
    {"optimizer", "cli"},
    {"federated"},
    {"__init__"},
)
PLACE = {room: place for place, rooms in enumerate(ORDER) for room in rooms}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file names in its imports, wherever they stand in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "edpsgd":
            yield from (f"edpsgd.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_packages_of_edpsgd_point_one_way() -> None:
    for path in (ROOT / "edpsgd").rglob("*.py"):
        own = path.relative_to(ROOT / "edpsgd").parts[0].removesuffix(".py")
        for name in imported(path):
            top, *rest = name.split(".")
            assert top not in ("models", "tasks", "mia", "benchmarks", "tests"), path
            if top == "edpsgd" and rest and rest[0] in PLACE and rest[0] != own:
                assert PLACE[rest[0]] < PLACE[own], f"{path} imports {name}"


def test_applications_point_one_way() -> None:
    order = ["models", "tasks", "mia", "benchmarks"]
    for place, package in enumerate(order):
        for path in (ROOT / package).rglob("*.py"):
            later = {name.split(".")[0] for name in imported(path)} & {*order[place + 1 :], "tests"}
            assert not later, f"{path} imports {later}"


def test_one_module_calls_horovod() -> None:
    places = {path for path in (ROOT / "edpsgd").rglob("*.py") if "horovod.torch" in path.read_text()}
    assert {path.name for path in places} <= {"horovod.py", "launchers.py"}
