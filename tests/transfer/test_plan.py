"""Which transport a pull takes: by what both ends have, what was measured, and what failed of late."""

from __future__ import annotations

from kvstore.cluster.page_mover import FAILED_MAX_S, FAILED_MIN_S, LAST_RESORT, STALE_S, TransportPlan, fit_for

BOTH = ["tcp", "fast"]
EXPECTED = {"tcp": 2e9, "fast": 0.0}
GB = 10**9


def test_what_was_not_measured_is_not_chosen_and_is_to_be_measured() -> None:
    plan = TransportPlan(EXPECTED)
    assert plan.order("n", BOTH, 0.0) == ["tcp"]
    assert plan.to_measure("n", BOTH, 0.0) == ["fast"]
    plan.note_success("n", "fast", GB, 0.1, 1.0)
    assert plan.order("n", BOTH, 1.0) == ["fast", "tcp"]
    assert plan.order("m", BOTH, 1.0) == ["tcp"], "of another node nothing is known"


def test_the_fastest_is_chosen_and_a_speed_grows_old() -> None:
    plan = TransportPlan(EXPECTED)
    plan.note_success("n", "tcp", 3 * GB, 1.0, 0.0)
    plan.note_success("n", "fast", GB, 1.0, 0.0)
    assert plan.order("n", BOTH, 0.0) == ["tcp", "fast"]
    assert plan.to_measure("n", BOTH, STALE_S - 1) == []
    assert plan.to_measure("n", BOTH, STALE_S) == ["fast"], "what is in use is measured as it is used"
    plan.note_success("n", "fast", 4 * GB, 1.0, STALE_S)
    assert plan.order("n", BOTH, STALE_S) == ["fast", "tcp"], "what was measured so long ago counts no more"
    for _ in range(20):
        plan.note_success("n", "fast", GB, 1.0, STALE_S)
    assert plan.order("n", BOTH, STALE_S) == ["tcp", "fast"], "it has become slow"


def test_what_failed_is_left_out_for_a_while_longer_each_time() -> None:
    plan = TransportPlan({"tcp": 2e9, "fast": 9e9})
    now_s, pauses = 0.0, []
    for _ in range(10):
        assert plan.order("n", BOTH, now_s) == ["fast", "tcp"]
        pauses.append(plan.note_failure("n", "fast", now_s))
        assert plan.order("n", BOTH, now_s + pauses[-1] - 0.01) == ["tcp"]
        now_s += pauses[-1]
    assert pauses[0] == FAILED_MIN_S and pauses[1] == 2 * FAILED_MIN_S and pauses[-1] == FAILED_MAX_S
    plan.note_success("n", "fast", 1, 1.0, now_s)
    assert plan.note_failure("n", "fast", now_s) == FAILED_MIN_S, "it had brought something"


def test_the_last_resort_is_always_there() -> None:
    plan = TransportPlan(EXPECTED)
    plan.note_failure("n", "tcp", 0.0)
    assert plan.order("n", ["tcp"], 0.0) == [LAST_RESORT]
    assert plan.order("n", [], 0.0) == [LAST_RESORT]
    assert plan.order("n", ["fast"], 0.0) == ["fast", "tcp"], "a node that offers it alone forces it"
    assert plan.to_measure("n", ["fast"], 0.0) == []


def test_why_a_transport_is_not_live() -> None:
    ours = {"tcp": "", "nixl": "not installed", "gds": ""}
    assert fit_for(ours, ["tcp", "nixl", "rdma"]) == {
        "tcp": "",
        "nixl": "not here: not installed",
        "gds": "not offered there",
        "rdma": "not known here",
    }
    assert fit_for({"tcp": ""}, ["nixl"]) == {"tcp": "the last resort", "nixl": "not known here"}
