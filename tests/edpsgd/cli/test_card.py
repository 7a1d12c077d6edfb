"""edpsgd card."""

from __future__ import annotations

import pytest

from edpsgd import card
from edpsgd.ledger import Ledger
from tests.helpers.edpsgd_command import refused, run, run_json


@pytest.fixture
def folder(tmp_path):
    """A run of one epoch with noise multiplier 1."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.begin_run({"workers": 3})
    ledger.open_epoch(0, "shuffled")
    ledger.charge(1.0)
    ledger.close()
    return tmp_path


def test_card_of_a_folder_and_of_a_file(capsys, folder) -> None:
    text = run(capsys, "card", str(folder), "--delta", "1e-5")
    assert text.startswith("# Privacy card\n\n**ε = 4.378 at δ = 1e-05** (exact Gaussian")
    assert "3 workers" in text
    assert run(capsys, "card", str(folder / "ledger.jsonl"), "--delta", "1e-5") == text
    data = run_json(capsys, "card", str(folder), "--delta", "1e-5")
    assert data["epsilon"] == pytest.approx(4.37717809568122, rel=1e-9)


def test_card_takes_delta_from_the_card_of_the_run(capsys, folder) -> None:
    assert "--delta must be given, since there is no" in refused(capsys, "card", str(folder))
    card.write(folder, Ledger(), 1e-3)
    assert run_json(capsys, "card", str(folder))["delta"] == 1e-3
    assert run_json(capsys, "card", str(folder), "--delta", "1e-6")["delta"] == 1e-6
    for damaged in ("{", "[]", '{"delta": 7}', '{"delta": null}', "{}"):
        (folder / "privacy_card.json").write_text(damaged)
        assert "holds none that can be read" in refused(capsys, "card", str(folder))


def test_card_keeps_what_the_run_says_of_itself(capsys, folder) -> None:
    """The metrics are not shown again, so they are not in the list either."""
    ledger = Ledger.read(folder / "ledger.jsonl")
    card.write(folder, ledger, 1e-3, {"SER": 0.5}, not_covered=["the word list: read from the training set"])
    plain = card.make(ledger, 1e-3).not_covered
    for command in (["card", str(folder)], ["card", str(folder / "ledger.jsonl"), "--delta", "1e-5"]):
        data = run_json(capsys, *command)
        assert data["not_covered"] == ["the word list: read from the training set", *plain]
        assert "- the word list: read from the training set\n" in run(capsys, *command)


@pytest.mark.parametrize("damaged", ["{", "[]", "{}", '{"not_covered": "all"}', '{"not_covered": [7]}', "\xff"])
def test_card_beside_a_card_that_cannot_be_read(capsys, folder, damaged) -> None:
    path = folder / "privacy_card.json"
    path.write_bytes(damaged.encode("latin-1"))
    message = f"RUN {path} cannot be read, and may say more of what ε does not cover: restore or remove it"
    assert message in refused(capsys, "card", str(folder), "--delta", "1e-5")


def test_card_without_a_ledger(capsys, tmp_path) -> None:
    line = refused(capsys, "card", str(tmp_path), "--delta", "1e-5")
    assert line == (
        "edpsgd card: error: RUN must be a ledger file or a folder with ledger.jsonl in it, got " + repr(str(tmp_path))
    )
    missing = str(tmp_path / "nothing")
    for more in ([], ["--delta", "1e-5"]):
        line = refused(capsys, "card", missing, *more)
        wanted = "RUN must be a ledger file or a folder with ledger.jsonl in it"
        assert line == f"edpsgd card: error: {wanted}, got {missing!r}"


def test_card_of_a_damaged_ledger(capsys, folder) -> None:
    path = folder / "ledger.jsonl"
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:-3], "ends in the middle of a line"),
        (whole.replace(b"1.0", b"9.0"), "the checksum does not match"),
        (b"hello\n", "line 1: not a ledger entry"),
        (b"\xff\xfe\n", "line 1: not a ledger entry"),
    ):
        path.write_bytes(damaged)
        assert message in refused(capsys, "card", str(folder), "--delta", "1e-5")


def test_card_of_a_ledger_of_another_version(capsys, tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger._write({"index": 0, "event": {"kind": "gradients", "epoch": 0, "shape": "round"}})
    ledger.close()
    assert refused(capsys, "card", str(tmp_path), "--delta", "1e-5").startswith("edpsgd card: error: RUN ")


def test_card_of_batches_that_cannot_be_accounted(capsys, tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open_epoch(0, "quasi-random")
    ledger.charge(1.0)
    ledger.close()
    assert "cannot be accounted for: quasi-random" in refused(capsys, "card", str(tmp_path), "--delta", "1e-5")


def test_card_names_a_bad_delta(capsys, folder) -> None:
    assert "--delta must be between 0 and 1, got 2" in refused(capsys, "card", str(folder), "--delta", "2")
