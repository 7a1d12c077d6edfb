"""Files that cannot be read: every error names the file and the line, and none of them holds any text."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest

from tasks.nlu.readers import ReadError, read
from tests.helpers.corpora import BLOCK, GOOD, HEADER, INTENT, OBJECT, ROW, TAGS, WORDS, aligned, written

SECRET = "xyzzyplugh"


def line_of(value: object) -> str:
    return OBJECT + json.dumps(value) + "\n"


def text_line(start: object, end: object, kind: object = "name") -> str:
    slot = {"type": kind, "start": start, "end": end}
    return line_of({"text": f"call {SECRET} now", "intent": "a", "slots": [slot]})


def check(error: ReadError, place: Path, what: str) -> None:
    assert str(error).startswith(f"{place}: ")
    assert what in str(error)
    assert SECRET not in "".join(traceback.format_exception(error))


BAD_LINES = [  # each with one good utterance before the bad one
    ("atis", aligned(f"{WORDS}{SECRET} b\n", f"{TAGS}O\n", f"{INTENT}a\n"), "train/seq.out:2", "1 tags for 2 words"),
    ("atis", aligned(f"{WORDS}{SECRET}\n", f"{TAGS}E-a\n", f"{INTENT}a\n"), "train/seq.out:2", "tag 1 is none of"),
    ("snips", aligned(f"{WORDS}a\n", f"{TAGS}{SECRET}\n", f"{INTENT}a\n"), "train/seq.out:2", "tag 1 is none of"),
    ("snips", aligned(f"{WORDS}{SECRET}\n", f"{TAGS}B-\n", f"{INTENT}a\n"), "train/seq.out:2", "tag 1 is none of"),
    ("atis", aligned(f"{WORDS} \n", f"{TAGS}O\n", f"{INTENT}a\n"), "train/seq.in:2", "is empty"),
    ("atis", aligned(f"{WORDS}{SECRET}\n", f"{TAGS}O\n", f"{INTENT} \n"), "train/label:2", "is empty"),
    (
        "atis",
        aligned(f"{WORDS}{SECRET} ".encode() + b"\xff\n", f"{TAGS}O O\n", f"{INTENT}a\n"),
        "train/seq.in:2",
        "UTF-8",
    ),
    ("atis", aligned(f"{WORDS}{SECRET}\n", f"{TAGS}O\n", INTENT.encode() + b"\xc3\n"), "train/label:2", "UTF-8"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}2;a;b;{SECRET} [c : d\n"}, "a.csv:3", "bracket"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}\n2;a;b;{SECRET} c : d]\n"}, "a.csv:4", "bracket"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}2;a;b;[c : {SECRET} [d : e] ]\n"}, "a.csv:3", "nested"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}2;a;b;[{SECRET}]\n"}, "a.csv:3", "[type : value]"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}2;a;b;[{SECRET} : ]\n"}, "a.csv:3", "[type : value]"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}2;a;b;[c {SECRET} : d]\n"}, "a.csv:3", "[type : value]"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}2;a;{SECRET}\n"}, "a.csv:3", "3 fields, and the header 4"),
    ("nlu-eval", {"a.csv": f'{HEADER}2;a;b;"{SECRET}\n{ROW}'}, "a.csv:2", "quotation mark"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}2;;b;{SECRET}\n"}, "a.csv:3", "scenario or intent is missing"),
    ("nlu-eval", {"a.csv": f"{HEADER}{ROW}2;a;b;{SECRET}".encode() + b"\xff\n"}, "a.csv:3", "UTF-8"),
    ("jsonl", {"a.jsonl": f"{OBJECT}{SECRET}\n"}, "a.jsonl:2", "no valid JSON"),
    ("jsonl", {"a.jsonl": f"{OBJECT}\n" + "[" * 100_000}, "a.jsonl:3", "no valid JSON"),
    ("jsonl", {"a.jsonl": line_of([SECRET])}, "a.jsonl:2", "no JSON object"),
    ("jsonl", {"a.jsonl": line_of({"text": SECRET, "slots": []})}, "a.jsonl:2", "'intent' is missing"),
    ("jsonl", {"a.jsonl": line_of({"text": SECRET, "intent": "a"})}, "a.jsonl:2", "'slots' is missing"),
    ("jsonl", {"a.jsonl": line_of({"tokens": [SECRET], "intent": "a"})}, "a.jsonl:2", "'tags' is missing"),
    ("jsonl", {"a.jsonl": line_of({"intent": SECRET, "slots": []})}, "a.jsonl:2", "'text' is missing"),
    ("jsonl", {"a.jsonl": line_of({"text": SECRET, "intent": " ", "slots": []})}, "a.jsonl:2", "intent is missing"),
    ("jsonl", {"a.jsonl": line_of({"text": " ", "intent": SECRET, "slots": []})}, "a.jsonl:2", "utterance is empty"),
    ("jsonl", {"a.jsonl": line_of({"text": SECRET, "intent": 1, "slots": []})}, "a.jsonl:2", "must be a string"),
    ("jsonl", {"a.jsonl": line_of({"text": SECRET, "intent": "a", "slots": [1]})}, "a.jsonl:2", "'type' is missing"),
    ("jsonl", {"a.jsonl": line_of({"tokens": [SECRET, 1], "tags": [], "intent": "a"})}, "a.jsonl:2", "list of strings"),
    ("jsonl", {"a.jsonl": line_of({"tokens": [SECRET], "tags": [], "intent": "a"})}, "a.jsonl:2", "0 tags for 1 words"),
    ("jsonl", {"a.jsonl": line_of({"tokens": [SECRET], "tags": ["X"], "intent": "a"})}, "a.jsonl:2", "1 is none of"),
    ("jsonl", {"a.jsonl": line_of({"tokens": [f"{SECRET} b"], "tags": ["O"], "intent": "a"})}, "a.jsonl:2", "blank"),
    ("jsonl", {"a.jsonl": line_of({"tokens": ["\ud800"], "tags": ["O"], "intent": SECRET})}, "a.jsonl:2", "UTF-8"),
    ("jsonl", {"a.jsonl": f'{OBJECT}{{"text": "{SECRET}'.encode() + b"\xff\n"}, "a.jsonl:2", "UTF-8"),
    ("jsonl", {"a.jsonl": text_line(6, 15)}, "a.jsonl:2", "slot 1 cuts a word"),
    ("jsonl", {"a.jsonl": text_line(5, 14)}, "a.jsonl:2", "slot 1 cuts a word"),
    ("jsonl", {"a.jsonl": text_line(5, 500)}, "a.jsonl:2", "outside the text"),
    ("jsonl", {"a.jsonl": text_line(5, 5)}, "a.jsonl:2", "ends before it starts"),
    ("jsonl", {"a.jsonl": text_line(-1, 4)}, "a.jsonl:2", "outside the text"),
    ("jsonl", {"a.jsonl": text_line(4, 5)}, "a.jsonl:2", "covers no word"),
    ("jsonl", {"a.jsonl": text_line(True, 4)}, "a.jsonl:2", "whole number"),
    ("jsonl", {"a.jsonl": text_line(0, 4, kind=f"{SECRET} b")}, "a.jsonl:2", "type of slot 1"),
    (
        "jsonl",
        {"a.jsonl": line_of({"text": SECRET, "intent": "a", "slots": [{"type": "b", "start": 0, "end": 10}] * 2})},
        "a.jsonl:2",
        "slot 2 overlaps",
    ),
    ("conll", {"a.conll": f"{BLOCK}# intent = a\nb O\n{SECRET}\n"}, "a.conll:8", "1 columns"),
    ("conll", {"a.conll": f"{BLOCK}# intent = a\n{SECRET} NN O\n"}, "a.conll:7", "3 columns"),
    ("conll", {"a.conll": f"{BLOCK}# intent = a\nb {SECRET}\n"}, "a.conll:7", "tag is none of"),
    ("conll", {"a.conll": f"{BLOCK}# note\n{SECRET} O\nb O\n"}, "a.conll:6", "intent is missing"),
    ("conll", {"a.conll": f"{BLOCK}# intent =\n{SECRET} O\n"}, "a.conll:6", "intent is missing"),
    ("conll", {"a.conll": f"{BLOCK}# intent = {SECRET}\n\n"}, "a.conll:6", "utterance is empty"),
    ("conll", {"a.conll": f"{BLOCK}# intent = a\nb O\n# intent = {SECRET}\nb O\n"}, "a.conll:8", "blank line"),
    ("conll", {"a.conll": f"{BLOCK}# intent = a\n{SECRET}".encode() + b"\xff O\n"}, "a.conll:7", "UTF-8"),
]  # fmt: skip

BAD_FILES = [  # to skip lines does not help
    ("atis", {"other/seq.in": SECRET}, "", "none of train, valid, test"),
    ("atis", {"train/seq.in": WORDS, "train/label": INTENT}, "train/seq.out", "no such file"),
    ("atis", aligned(WORDS, "", INTENT), "train/seq.out:1", "is empty"),
    ("snips", aligned(f"{WORDS}{SECRET}\n", TAGS, INTENT), "train/seq.out:2", "has ended"),
    ("snips", aligned(WORDS, TAGS, f"{INTENT}{SECRET}\n"), "train/seq.in:2", "has ended"),
    ("nlu-eval", {"a.txt": SECRET}, "", "no *.csv file"),
    ("nlu-eval", {"a.csv": ""}, "a.csv:1", "is empty"),
    ("nlu-eval", {"a.csv": f"answerid;scenario;intent;{SECRET}\n{ROW}"}, "a.csv:1", "answer_annotation is missing"),
    ("nlu-eval", {"a.csv": f"scenario,intent,answer_annotation\na,b,{SECRET}\n"}, "a.csv:1", "scenario is missing"),
    ("jsonl", {"a.json": SECRET}, "", "no *.jsonl file"),
    ("jsonl", {"a.jsonl": OBJECT, "b.jsonl": ""}, "b.jsonl:1", "is empty"),
    ("conll", {"a.csv": SECRET}, "", "no *.conll or *.txt file"),
    ("conll", {"a.conll": ""}, "a.conll:1", "is empty"),
]


@pytest.mark.parametrize(("task", "files", "place", "what"), BAD_LINES)
def test_a_bad_line_is_named_and_not_quoted(tmp_path, task, files, place, what):
    written(tmp_path, files)
    with pytest.raises(ReadError) as caught:
        read(task, tmp_path)
    check(caught.value, tmp_path / place, what)


@pytest.mark.parametrize(("task", "files", "place", "what"), BAD_LINES)
def test_a_bad_line_can_be_skipped(tmp_path, task, files, place, what):
    corpus = read(task, written(tmp_path, files), skip_bad_lines=True)
    assert list(corpus) == [GOOD]
    assert (corpus.skipped, corpus.left_out, corpus.repaired) == (1, 0, 0)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("task", "files", "place", "what"), BAD_FILES)
def test_a_bad_file_is_an_error_in_any_case(tmp_path, task, files, place, what, skip):
    written(tmp_path, files)
    with pytest.raises(ReadError) as caught:
        read(task, tmp_path, skip_bad_lines=skip)
    check(caught.value, tmp_path / place, what)


def test_if_nothing_is_left_it_is_an_error(tmp_path):
    written(tmp_path, {"a.jsonl": f"{SECRET}\n{SECRET}\n", "a.csv": f"{HEADER}1;a;b;null\n"})
    with pytest.raises(ReadError, match=r"no utterance \(2 bad lines skipped, 0 rows left out\)"):
        read("jsonl", tmp_path, skip_bad_lines=True)
    with pytest.raises(ReadError, match=r"no utterance \(0 bad lines skipped, 1 rows left out\)"):
        read("nlu-eval", tmp_path)


def test_an_unknown_task_is_named(tmp_path):
    with pytest.raises(ValueError, match="task must be one of atis, .*got 'mail'"):
        read("mail", tmp_path)
