"""The cost model, against a world that is like it and by hand."""

from __future__ import annotations

import pytest

from benchmarks.harness import cost_model


def in_a_world_like_the_model(workers: int, beside: int, cores: int) -> dict:
    """100 ms of computation, 10 for each worker beside, 5 of norms, 40 of noise, 30 of wire on two, 7 of the rest."""
    waiting, compute = max(1.0, workers / cores), 100 + 10 * beside
    noise, wire = 40 / workers, 30 * 2 * (workers - 1) / workers
    parts = {"norm": 2.0, "scale": 3.0, "noise": noise, "wire": wire, "whole": 0.0}
    whole = {"sgd": compute * waiting + wire, "edp": waiting * (compute + 5 + 7 + noise) + wire}
    return {"parameters": 9, "whole_ms": whole, "parts_ms": parts, "machine": {"cores": cores}}


def test_the_cost_model_finds_the_parts_and_predicts_the_rest() -> None:
    measured = {workers: in_a_world_like_the_model(workers, workers - 1, 2) for workers in (1, 2, 3)}
    found = cost_model.fit(measured)
    parts = {"compute": 100, "beside": 10, "norm": 5, "noise": 40, "wire": 30, "rest": 7}
    assert found["parts_ms"] == pytest.approx(parts)
    assert all(one["predicted_ms"] == pytest.approx(one["ms"]) for one in found["measured"])
    assert {one["workers"] for one in found["measured"]} == {1, 2, 3}
    for one in found["predicted"]:
        own = in_a_world_like_the_model(one["workers"], 1, 64)["whole_ms"]
        assert (one["sgd_ms"], one["edp_ms"]) == pytest.approx((own["sgd"], own["edp"]))


def test_the_cost_model_by_hand() -> None:
    """SGD takes 100 ms on one worker and 120 on two, 6 of them for the wire."""
    alone = {"parameters": 9, "whole_ms": {"sgd": 100.0, "edp": 130.0}, "parts_ms": {}, "machine": {"cores": 2}}
    two = {"parameters": 9, "whole_ms": {"sgd": 120.0, "edp": 145.0}, "machine": {"cores": 2}}
    two["parts_ms"] = {"norm": 4.0, "noise": 10.0, "wire": 6.0}
    found = cost_model.fit({1: alone, 2: two})
    assert found["parts_ms"]["rest"] == pytest.approx(145 - 114 - 4 - 10 - 6)
    [four] = [one for one in found["predicted"] if one["workers"] == 4]
    assert four["edp_ms"] == pytest.approx(114 + 4 + 11 + 20 / 4 + 6 * 1.5)
    assert four["sgd_ms"] == pytest.approx(114 + 6 * 1.5)
