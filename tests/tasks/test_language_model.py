"""The command that trains a language model: its plan, and its errors. Jobs are in language/."""

from __future__ import annotations

import pytest

from tasks.language_model import main
from tests.helpers.language_jobs import PRIVATE, SMALL


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys) -> None:
    main([*PRIVATE, "--dry-run", "--output", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "noise multiplier 1," in said
    assert "planned: ε" in said
    assert not (tmp_path / "run").exists()


def test_an_error_is_one_line(tmp_path) -> None:
    with pytest.raises(SystemExit, match="error: .*nowhere: there is no such file"):
        main([*SMALL, "--dry-run", "--dictionary", str(tmp_path / "nowhere")])
