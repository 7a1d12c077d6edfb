"""What labels, ledgers and texts of others can do to a page, a terminal and a colleague's eyes: nothing."""

from __future__ import annotations

import json
import os
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.report.blocks import Table, Text
from edpsgd import Ledger, LedgerError, card, cli, escaping, files
from mia import secret_sharer
from tasks import language_model, predict, train
from tasks.language.dictionary import Dictionary
from tasks.language.readers import write_jsonl
from tasks.language.user_generator import generate
from tasks.nlu import run_folder
from tasks.nlu.configuration import Config, read_file
from tasks.nlu.labels import Labels
from tests.helpers.jobs import run as run_job
from tests.helpers.jobs import tiny
from tests.tasks.test_predict import parts, terminal  # noqa: F401 (a fixture)

CLEAR = "\x1b[2J\x1b[1;1H"
MARKUP = "<script>alert(1)</script><img src=x onerror=y> | [link](javascript:z)"
EVIL = f"{MARKUP} {CLEAR}\x9b2J \u202ecod \u2028# ε = 0.1\r\n# ε = 0.2\x07"


def hidden(text: str, keep: str = "\n") -> list[str]:
    """Characters that a terminal or an eye does not take for text."""
    return [c for c in text if c not in keep and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


# ---------------------------------------------------------------- card


def hostile_ledger(path: Path | None = None) -> Ledger:
    """Every text of a run's settings is a trap, and so is the name of one."""
    ledger = Ledger(path)
    batches = {**dict.fromkeys(("weights", "denominator", "slots"), EVIL), "kind": "shuffled", f"y{EVIL}": EVIL}
    names = ("noise_decay", "clipping", "noise", "noise_placement", "compression", "verify")
    for turn in ("a", "b"):
        values = dict.fromkeys((*names, f"x{EVIL}"), turn + EVIL)
        scales = {turn + EVIL: 1.0}
        ledger.begin_run({**values, "unit": "micro_batch", "batches": batches, "layer_scaling": scales})
    ledger.open_epoch(0, "shuffled")
    ledger.charge(1.0)
    return ledger


def is_neutral(page: str) -> bool:
    """Without HTML, links and hidden characters, and with the headings that every card has."""
    tags = [rest for rest in page.split("<")[1:] if not rest.startswith(" ")]
    headings = [line for line in page.splitlines() if line.startswith("#")]
    links = page.replace("\\](", "").count("](")
    return not hidden(page) and not tags and not links and not any("ε = 0" in line for line in headings)


def test_a_card_is_text(tmp_path) -> None:
    made = card.write(tmp_path, hostile_ledger(), 1e-5, {"a<b>[x](y)": 1.0}, ["the <b>list</b> of [words](x)"])
    assert is_neutral(made.markdown())
    assert "&lt;script>" in made.markdown()
    written = (tmp_path / "privacy_card.json").read_text(encoding="utf-8")
    assert not hidden(written)
    assert json.loads(written)["settings"]["clipping"] == f"b{EVIL}"  # programs get what was written


@pytest.mark.parametrize("name", ["clip_norm", "noise_multiplier", "layer_scaling", "divisor", "sensitivity"])
def test_a_text_is_no_number_and_is_not_repeated(name) -> None:
    with pytest.raises(LedgerError, match=f"a run has {name}") as caught:
        Ledger().begin_run({name: f"a{EVIL}"})
    assert not hidden(str(caught.value))


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_card_on_a_terminal(tmp_path, capsys, more) -> None:
    hostile_ledger(tmp_path / "ledger.jsonl").close()
    assert cli.main(["card", str(tmp_path), "--delta", "1e-5", *more]) == 0
    assert not hidden(capsys.readouterr().out)


def test_an_error_on_a_terminal(tmp_path, capsys) -> None:
    assert cli.main(["card", str(tmp_path / f"none{CLEAR}"), "--delta", "1e-5"]) == 2
    assert not hidden(capsys.readouterr().err)


# ---------------------------------------------------------------- report


def test_a_report_is_text() -> None:
    blocks = [Text(EVIL, "note"), Table(EVIL, [EVIL], {EVIL: str, "b": str})]
    for block in blocks:
        page = block.html()
        assert not hidden(page)
        assert "<script" not in page
        assert "<img" not in page
        lines = "\n".join(block.markdown())
        assert not hidden(lines)
        assert "<script" not in lines


# ---------------------------------------------------------------- terminal


def trap(parts: run_folder.Parts) -> None:  # noqa: F811
    """Labels of its own: those of the fixture are everybody's."""
    intents = ["other", f"phone{EVIL}", "music"]
    parts.labels = Labels(intents, ["O", f"B-name{EVIL}", f"I-name{EVIL}", "B-song", "I-song"])


def test_labels_on_a_terminal(parts, monkeypatch) -> None:  # noqa: F811
    trap(parts)
    screen = terminal(monkeypatch)
    predict.main(["--run", "x", "--text", f"call anna {CLEAR}", "--text", "\u202eplay"])
    shown = screen.getvalue()
    for style in ("\x1b[1m", "\x1b[0m", "\x1b[1;36m", "\x1b[36m"):  # the colours are our own
        shown = shown.replace(style, "")
    assert not hidden(shown)
    assert "phone<script>" in shown
    assert "\\x1b[2J" in shown


def test_labels_in_json_lines(parts, capsys) -> None:  # noqa: F811
    trap(parts)
    predict.main(["--run", "x", "--text", f"call anna{CLEAR}"])
    said = capsys.readouterr().out
    assert not hidden(said)
    assert json.loads(said)["intent"] == f"phone{EVIL}"


@pytest.mark.parametrize("job", [train, language_model, predict, secret_sharer])
def test_errors_of_jobs_on_a_terminal(tmp_path, job) -> None:
    place = str(tmp_path / f"none{CLEAR}")
    arguments = {
        train: ["--task", "jsonl", "--data", place, "--private", "off"],
        language_model: ["--task", "jsonl", "--data", place, "--dictionary", place],
        predict: ["--run", place, "--text", "call"],
        secret_sharer: ["measure", "--run", place, "--canaries", place],
    }
    with pytest.raises(SystemExit) as error:
        job.main(arguments[job])
    assert "none\\x1b[2J" in str(error.value)
    assert not hidden(str(error.value))


def test_characters_that_are_text_stay() -> None:
    text = "größe 東京 नमस्ते \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 👩\u200d🔬 a\u0301"
    assert escaping.visible(text) == text
    assert escaping.json_text({"text": text}) == json.dumps({"text": text}, ensure_ascii=False)


def test_every_character_is_shown_or_spelled() -> None:
    for number in range(0x110000):
        shown = escaping.visible(chr(number))
        assert shown == chr(number) or (shown.startswith("\\") and shown.isascii())
        assert not set(hidden(shown)) - set("\u200c\u200d")


# ---------------------------------------------------------------- private folders


@pytest.fixture(autouse=True)
def _open_mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """What in a folder, and the folder itself, others can read, or is not of the mode that it should have."""
    found = [folder, *folder.rglob("*")]
    wanted = {path: 0o700 if path.is_dir() else 0o600 for path in found}
    return [str(path) for path, mode in wanted.items() if stat.S_IMODE(path.stat().st_mode) != mode]


def open_up(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_run_folder_is_private_and_stays_so(tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    run_job(tiny(folder, checkpoint_every=5, canaries=4, tensorboard=True, early_stopping=3))
    assert open_to_others(folder) == []
    open_up(folder)
    run_job(Config(**{**read_file(folder / "config.yaml"), "output": str(folder)}), resume=folder)
    assert open_to_others(folder) == []
    assert os.umask(0o022) == 0o022  # others of this process are as before


def test_the_run_folder_of_a_language_model_is_private(tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    small = "--users 40 --sentences 4 --words 30 --hidden 4 --dimension 4 --cohort 8 --rounds 2 --checkpoint-every 1"
    language_model.main([*small.split(), "--clip-norm", "2", "--noise-multiplier", "1", "--output", str(folder)])
    assert open_to_others(folder) == []
    open_up(folder)
    language_model.main(["--resume", str(folder)])
    assert open_to_others(folder) == []


def test_texts_with_canaries_are_private(tmp_path) -> None:
    write_jsonl(tmp_path / "users.jsonl", generate(20, 0, 4, 30))
    Dictionary([f"w{i}" for i in range(30)]).save(tmp_path / "words.txt")
    output = tmp_path / "out"
    output.mkdir(mode=0o755)
    arguments = ["--users", tmp_path / "users.jsonl", "--dictionary", tmp_path / "words.txt", "--output", output]
    secret_sharer.main(["insert", *map(str, arguments), "--rates", "0.5:0.5", "--per", "1"])
    assert sorted(os.listdir(output)) == ["canaries.json", "users.jsonl"]
    assert open_to_others(output) == []


def test_a_folder_for_everybody_is_refused(tmp_path) -> None:
    """Nobody else could use /tmp after it had become one user's."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.raises(OSError, match="a folder for everybody"):
        run_job(tiny(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert os.listdir(folder) == []


def test_links_lead_out_of_the_folder(tmp_path) -> None:
    """What a link in a run folder points to is not the run's to change."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "file").touch(0o644)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "folder").symlink_to(outside)
    (tmp_path / "run" / "file").symlink_to(outside / "file")
    files.make_private(tmp_path / "run", with_content=True)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755
    assert stat.S_IMODE((outside / "file").stat().st_mode) == 0o644


def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch) -> None:
    files.write_text(tmp_path / "a.json", "old")

    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_text(tmp_path / "a.json", "new")
    assert os.listdir(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"
