"""What a command line with bad settings says."""

from __future__ import annotations

import pytest

from tasks.nlu.configuration import parse


def refused(capsys, *arguments: str) -> str:
    """What the command says before it ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        parse(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]
