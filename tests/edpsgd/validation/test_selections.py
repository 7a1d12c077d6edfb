"""The batches in which losses are tried."""

from __future__ import annotations

from edpsgd.validation.selections import selections_of


def test_all_kinds_of_batches_are_there() -> None:
    selections = list(selections_of(0, [[5], [2, 3], [], [2]]))
    sizes = [len(selection) for selection in selections]
    assert sizes[0] == 4
    assert 1 in sizes
    assert 2 * 4 + 1 in sizes
    assert selections[-2:] == [[0], [3]]
    assert any(selection != sorted(selection) for selection in selections)
    assert {number for selection in selections for number in selection} == {0, 1, 2, 3}


def test_as_many_examples_as_tokens() -> None:
    """Of the shortest example of which a size was seen, with others that are no longer."""
    selections = list(selections_of(0, [[5], [3, 2], [], [2]]))
    square = [selection for selection in selections if selection[0] == 3 and len(selection) == 2]
    assert any(set(selection) <= {2, 3} for selection in square)


def test_a_seed_repeats_them_and_another_one_does_not() -> None:
    counts = [[3]] * 9
    assert list(selections_of(1, counts)) == list(selections_of(1, counts))
    assert list(selections_of(1, counts)) != list(selections_of(2, counts))
