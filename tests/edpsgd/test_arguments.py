"""What errors show of what they were given."""

from __future__ import annotations

import numpy as np
import pytest

import edpsgd
from tests.helpers.common import Bag, private


@pytest.mark.parametrize(
    "make",
    [
        lambda: private(Bag(), seed=np.int64(123456789)),
        lambda: edpsgd.ShuffledBatches(8, 2, collective="local", seed="123456789"),
        lambda: edpsgd.FedAvg(["call anna at 123456789"]),
        lambda: edpsgd.Budget(["call anna at 123456789"], 1e-5),
    ],
)
def test_seeds_and_texts_are_not_told(make) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        make()
    assert "123456789" not in str(caught.value)
