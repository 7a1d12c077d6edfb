"""Calls of the edpsgd command, and what it printed."""

from __future__ import annotations

import json

from edpsgd import cli

TRAINING = ["--delta", "1e-5", "--examples", "8000", "--batch", "80"]
PLAN = ["plan", "--epsilon", "8", *TRAINING, "--epochs", "20"]
EPSILON = ["epsilon", "--noise", "1", *TRAINING, "--epochs", "1"]


def run(capsys, *argv: str) -> str:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def run_json(capsys, *argv: str) -> dict:
    return json.loads(run(capsys, *argv, "--json"))


def refused(capsys, *argv: str) -> str:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err.strip()


def changed(command: list[str], flag: str, value: str) -> list[str]:
    """The command with another value for the flag, which it may lack."""
    if flag not in command:
        return [*command, flag, value]
    at = command.index(flag) + 1
    return [*command[:at], value, *command[at + 1 :]]
