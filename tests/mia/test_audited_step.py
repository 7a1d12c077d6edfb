"""The settings of an audit: bad ones are refused."""

from __future__ import annotations

import math

import pytest

from mia.audited_step import Setup


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a finite number > 0, got 0.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"micro_batches": 0}, "micro_batches must be an int >= 1, got 0"),
        ({"epoch": -1}, "epoch must be an int >= 0"),
        ({"scaling": "private:1,2"}, "scaling must be none, public:A,B,C or private:Z"),
        ({"scaling": "public:1,-2,4"}, "numbers > 0"),
        ({"scaling": "public:1,2,x"}, "scaling"),
        ({"scaling": "public"}, "scaling"),
    ],
)
def test_bad_settings(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Setup(**arguments)
