"""The command `python -m tasks.tune`."""

from __future__ import annotations

import pytest

from tasks.tune import main
from tests.helpers.training_commands import flags, names


def test_the_command_prints_table_card_and_folder(tmp_path, capsys) -> None:
    folder = tmp_path / "tuning"
    given = flags(folder, epochs=1, private="example", epsilon=8.0)
    search = tmp_path / "space.json"
    search.write_text('{"learning-rate": [0.01]}')
    main([*given, "--trials", "1", "--search", str(search)])
    output = capsys.readouterr().out
    assert "best of a random number of trainings, 1 on average" in output
    assert f"run folder: {folder / 'best'}" in output
    assert "private: how many trainings there were" in output
    assert "ledger.jsonl" in names(folder / "best")
    main(["--resume", str(folder)])
    assert f"run folder: {folder / 'best'}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--resume", str(folder), "--trials", "2"])
    assert "--trials cannot change with --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert "holds a run" in str(ended.value.code)


def test_public_data_and_bad_numbers(tmp_path, capsys) -> None:
    search = tmp_path / "space.json"
    search.write_text('{"learning-rate": [0.01]}')
    given = flags(tmp_path / "tuning", epochs=1, private="off")
    main([*given, "--trials", "1", "--search", str(search), "--public"])
    output = capsys.readouterr().out
    assert "nothing was charged: public data are free to tune on" in output
    assert f"--config {tmp_path / 'tuning' / 'settings.yaml'}" in output
    for trials in ("0", "nan"):
        with pytest.raises(SystemExit):
            main([*given, "--trials", trials])
        assert "--trials must be from 1 to 10000" in capsys.readouterr().err
