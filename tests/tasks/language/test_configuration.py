"""Settings of a language-model job that contradict each other."""

from __future__ import annotations

import pytest

from tasks import language_model
from tests.helpers.language_jobs import SMALL


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--noise-multiplier", "1"], "noise needs --clip-norm"),
        (["--epsilon", "1", "--noise-multiplier", "1", "--clip-norm", "1"], "not both"),
        (["--algorithm", "sgd", "--clip-norm", "1"], "plain baseline"),
        (["--as-if-users", "5"], "belong together"),
        (["--denominator", "clipped:x"], "fixed, fixed:W or clipped:W"),
        (["--clip-changes", "3"], "S@ROUND"),
        (["--clip-norm", "1", "--clip-changes", "3@5,2@5"], "different rounds"),
        (["--clip-changes", "3@5"], "needs --clip-norm"),
        (["--as-if-users", "5", "--as-if-cohort", "2"], "with noise and --sampling poisson"),
        (["--task", "jsonl"], "data must be the file or folder to read"),
        (["--held-out", "1"], "between 0 and 1"),
        (["--cohort", "0"], "above 0"),
    ],
)
def test_bad_settings(capsys, flags, message) -> None:
    with pytest.raises(SystemExit):
        language_model.main([*SMALL, *flags])
    assert message in capsys.readouterr().err
