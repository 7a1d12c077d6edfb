"""The command that answers: streams, a terminal, and what is refused."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator

import numpy as np
import pytest

from models.clc import ClcInputs
from models.vectors import WordVectors
from tasks import predict
from tasks.nlu import generator, new_model, prediction, run_folder
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import Corpus
from tests.helpers.rule_model import LABELS, WORDS, ByRule, texts


@pytest.fixture
def parts(monkeypatch) -> run_folder.Parts:
    """What the command loads, whatever the folder."""
    parts = run_folder.Parts(ByRule(), ClcInputs(WordVectors(WORDS, None, "list", 8)), LABELS)
    monkeypatch.setattr(predict, "load", lambda folder: parts)
    return parts


def answers(capsys) -> list[dict]:
    """What was printed: one JSON object in each line."""
    out = capsys.readouterr().out
    assert out.endswith("\n")
    return [json.loads(line) for line in out[:-1].split("\n")]


class Keyboard(io.TextIOWrapper):
    """Standard input."""

    def __init__(self, content: bytes, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(content), encoding="ascii")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Screen(io.StringIO):
    """Standard output that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_texts(parts, capsys) -> None:
    predict.main(["--run", "x", "--text", "call anna", "--text", "play Zürich", "--text", ""])
    found = answers(capsys)
    assert [one["intent"] for one in found] == ["phone", "music", None]
    assert found[1]["text"] == "play Zürich"
    assert found[0]["slots"][0]["score"] == 0.8


def test_no_scores(parts, capsys) -> None:
    predict.main(["--run", "x", "--no-scores", "--text", "call anna"])
    [found] = answers(capsys)
    assert found["slots"] == [{"type": "name", "value": "anna", "start": 5, "end": 9}]
    assert found["score"] == 0.75


def test_file(parts, capsys, tmp_path, monkeypatch) -> None:
    """UTF-8 with a mark at its beginning, any ends of lines, and none after the last line."""
    monkeypatch.setattr(prediction, "CHUNK", 3)
    path = tmp_path / "said.txt"
    path.write_bytes(b"\xef\xbb\xbfcall anna\r\n\nplay \xc3\x9cber\ncall\xe2\x80\xa8anna\nplay")
    predict.main(["--run", "x", str(path)])
    found = answers(capsys)
    assert [one["text"] for one in found] == ["call anna", "", "play Über", "call\u2028anna", "play"]
    assert [one["intent"] for one in found] == ["phone", None, "music", "phone", "music"]
    assert [len(one["slots"]) for one in found] == [1, 0, 0, 1, 0]


def test_standard_input(parts, capsys, monkeypatch) -> None:
    monkeypatch.setattr(prediction, "CHUNK", 3)
    said = [text.strip() for text in texts(10)]
    monkeypatch.setattr("sys.stdin", Keyboard("\n".join([*said, "call Zürich"]).encode()))
    predict.main(["--run", "x"])
    assert [one["text"] for one in answers(capsys)] == [*said, "call Zürich"]


def test_somebody_who_types_is_answered_line_by_line(parts, monkeypatch) -> None:
    screen, seen = Screen(), []
    keyboard = Keyboard(b"", is_terminal=True)

    def typed() -> Iterator[bytes]:
        for line in (b"call anna\n", b"play\n"):
            seen.append(screen.getvalue().count("\n"))
            yield line

    monkeypatch.setattr("sys.stdin", keyboard)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr(predict, "_opened", lambda flags: predict.nullcontext(typed()))
    predict.main(["--run", "x", "--json"])
    assert seen == [0, 1]
    assert [json.loads(line)["intent"] for line in screen.getvalue().splitlines()] == ["phone", "music"]


def terminal(monkeypatch) -> Screen:
    """A terminal with colours; pytest would take a fixture's own away."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = Screen()
    monkeypatch.setattr("sys.stdout", shown)
    return shown


def test_coloured_lines(parts, monkeypatch) -> None:
    """A slot has a colour, its type and its score; what looks like markup is printed as it is."""
    screen = terminal(monkeypatch)
    said = ["call  anna lee :smile: [bold]b[/bold]", "", "play [red]x[/red]"]
    predict.main(["--run", "x", *(argument for text in said for argument in ("--text", text))])
    first, second, third = screen.getvalue().splitlines()
    assert first == (
        "\x1b[1mphone 75%\x1b[0m  call  \x1b[1;36manna lee\x1b[0m\x1b[36m[name 70%]\x1b[0m :smile: [bold]b[/bold]"
    )
    assert "(nothing said)" in second
    assert third == "\x1b[1mmusic 75%\x1b[0m  play \x1b[1;36m[red]x[/red]\x1b[0m\x1b[36m[song 60%]\x1b[0m"


def test_two_slots_have_two_colours(parts, monkeypatch) -> None:
    screen = terminal(monkeypatch)
    predict.main(["--run", "x", "--no-scores", "--text", "[red]x[/red] anna anna " + "long " * 60])
    [line] = screen.getvalue().splitlines()  # no wrapping either
    assert "\x1b[1;35m[red]x[/red]\x1b[0m\x1b[35m[song]\x1b[0m" in line
    assert line.count("\x1b[1;36manna\x1b[0m\x1b[36m[name]\x1b[0m") == 2


def test_json_on_a_terminal(parts, monkeypatch) -> None:
    screen = terminal(monkeypatch)
    predict.main(["--run", "x", "--json", "--text", "call [red]x[/red]"])
    assert json.loads(screen.getvalue())["text"] == "call [red]x[/red]"


def test_output_that_knows_ascii_only(parts, monkeypatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    predict.main(["--run", "x", "--text", "call Zürich"])
    assert json.loads(raw.getvalue().decode("ascii"))["text"] == "call Zürich"


def test_real_run_folder(tmp_path, capsys) -> None:
    """From the disk, in one process: what the model of the folder says."""
    corpus = Corpus(generator.utterances(15, seed=1))
    made = new_model.build(Config(private="off", hidden=8, layers=1, dimension=8), corpus, np.arange(15))
    made.save(tmp_path / "run")
    made.save_weights(tmp_path / "run")
    said = [" ".join(one.words) for one in corpus]
    (tmp_path / "said.txt").write_text("\n".join(said), encoding="utf-8")
    predict.main(["--run", str(tmp_path / "run"), str(tmp_path / "said.txt"), "--batch-size", "7"])
    found = answers(capsys)
    made.model.eval()
    for text, one in zip(said, found, strict=True):
        [alone] = prediction.predict(made, [text])
        assert (one["text"], one["intent"]) == (text, alone["intent"])
        assert one["score"] == pytest.approx(alone["score"], abs=1e-5)
        assert [s["start"] for s in one["slots"]] == [s["start"] for s in alone["slots"]]
        assert [s["score"] for s in one["slots"]] == pytest.approx([s["score"] for s in alone["slots"]], abs=1e-5)
    assert any(one["slots"] for one in found)


# ---------------------------------------------------------------- refusals


def test_training_that_has_not_ended(parts, tmp_path, capsys) -> None:
    """Its folder holds the weights that it began with: answers would be chance."""
    (tmp_path / "config.yaml").write_text("task: generated\n", encoding="utf-8")
    arguments = ["--run", str(tmp_path), "--text", "call anna"]
    for metrics in (None, '{"epoch": 0, "step": 4, "validation_ser": 80.0}\n'):
        if metrics is not None:
            (tmp_path / "metrics.jsonl").write_text(metrics, encoding="utf-8")
        with pytest.raises(SystemExit, match="has not ended: go on with tasks.train --resume"):
            predict.main(arguments)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 8, "test_ser": 12.0}\n')
    predict.main(arguments)
    assert answers(capsys)[0]["intent"] == "phone"


def refused(*arguments: str) -> str:
    """The message with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        predict.main(["--run", "x", *arguments])
    assert isinstance(ended.value.code, str)
    return ended.value.code


def test_text_that_is_not_utf8(parts, tmp_path, monkeypatch, capsys) -> None:
    """The error names file and line, and nothing that was said."""
    bad = b"call anna\nplay lee\nsecret \xff words\ncall\n"
    path = tmp_path / "said.txt"
    path.write_bytes(bad)
    assert refused(str(path)) == f"error: {path}:3: the line is not UTF-8"
    monkeypatch.setattr("sys.stdin", Keyboard(bad))
    assert refused() == "error: standard input:3: the line is not UTF-8"
    assert refused("--text", "call", "--text", os.fsdecode(b"secret \xff")) == "error: --text:2: the line is not UTF-8"
    assert "secret" not in "".join(capsys.readouterr())


def test_answers_before_a_bad_line_are_given(parts, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(prediction, "CHUNK", 2)
    path = tmp_path / "said.txt"
    path.write_bytes(b"call anna\nplay lee\ncall\n\xff\n")
    assert ":4: the line is not UTF-8" in refused(str(path))
    assert [one["text"] for one in answers(capsys)] == ["call anna", "play lee"]


def test_files_and_folders_that_there_are_not(parts, tmp_path, monkeypatch) -> None:
    assert "none.txt" in refused(str(tmp_path / "none.txt"))
    assert str(tmp_path) in refused(str(tmp_path))
    monkeypatch.undo()
    with pytest.raises(SystemExit, match=f"error: {tmp_path} is not a run folder"):
        predict.main(["--run", str(tmp_path), "--text", "call"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["said.txt", "--text", "call"], "a file or --text, not both"),
        (["--batch-size", "0", "--text", "call"], "--batch-size must be at least 1, got 0"),
        (["--batch-size", "x", "--text", "call"], "invalid int value"),
        (["--device", "tpu", "--text", "call"], "invalid choice"),
    ],
)
def test_bad_arguments(parts, capsys, arguments, message) -> None:
    with pytest.raises(SystemExit) as ended:
        predict.main(["--run", "x", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_no_gpu(parts, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused("--device", "cuda", "--text", "call") == "error: device is cuda, and torch finds no GPU"


def test_reader_that_has_enough(parts, monkeypatch) -> None:
    """As `head`: the command ends without a word, now and when Python closes the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    pipe = os.fdopen(writing, "w", encoding="utf-8")
    monkeypatch.setattr("sys.stdout", pipe)
    with pytest.raises(SystemExit) as ended:
        predict.main(["--run", "x", "--text", "call"])
    assert ended.value.code == 1
    pipe.close()
