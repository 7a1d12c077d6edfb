"""The command that writes a first schema."""

from __future__ import annotations

import json

import pytest

from tasks import schema as command
from tasks.nlu import label_schema
from tasks.nlu.label_schema import Schema


def test_a_first_schema_is_read_from_data_until_somebody_confirms_it(tmp_path, capsys) -> None:
    corpus = tmp_path / "said.jsonl"
    lines = [{"text": f"call anna {number}", "intent": "call", "slots": []} for number in range(40)]
    lines += [
        {"text": f"wake {number:02d}", "intent": "wake", "slots": [{"type": "time", "start": 5, "end": 7}]}
        for number in range(40)
    ]
    corpus.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    output = tmp_path / "labels.yaml"
    arguments = ["--task", "jsonl", "--data", str(corpus), "--output", str(output)]
    command.main(arguments)
    assert "take the line read_from_data away" in capsys.readouterr().out
    assert output.stat().st_mode & 0o077 == 0
    found = label_schema.read(output)
    assert found == Schema(["call", "wake"], ["time"], {"call": [], "wake": ["time"]}, is_confirmed=False)
    assert found.labels().read_from_data
    output.write_text(output.read_text().replace("read_from_data: true\n", ""))
    assert label_schema.read(output).is_confirmed
    with pytest.raises(SystemExit, match="exists: name another file"):
        command.main(arguments)
