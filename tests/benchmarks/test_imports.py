"""Benchmarks import one way: commands use the report, the report uses the harness."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
ALLOWED = {"harness": ("benchmarks.harness",), "report": ("benchmarks.harness", "benchmarks.report")}


def imported(file: Path) -> Iterator[str]:
    """The modules of benchmarks that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks"):
            yield str(node.module)
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("benchmarks"))


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_one_way(room) -> None:
    files = sorted((BENCHMARKS / room).rglob("*.py"))
    assert len(files) > 5
    for file in files:
        for module in imported(file):
            assert module.startswith(ALLOWED[room]), f"{file.name} imports {module}"
