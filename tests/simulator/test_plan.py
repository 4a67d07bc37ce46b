"""Plans: formulas of one request, sizes of tiers, and which design wins where."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from engine.simulator.cli import plan, read_slo
from engine.simulator.cluster import ClusterSpec, EngineCache
from engine.simulator.generate import conversations
from engine.simulator.hardware import LINKS
from engine.simulator.plan import (
    Slo,
    break_even_tokens,
    exposed_s,
    make_plan,
    move_s,
    reuse_distances,
    tier_sizes,
    workload,
)
from engine.simulator.trace import BLOCK_TOKENS, TraceRequest
from kvstore.errors import InvalidRequest

SPEC = ClusterSpec(engines=4, engines_per_host=4)


def test_a_prefix_is_worth_loading_exactly_from_the_break_even_length_on() -> None:
    roofline = SPEC.roofline()
    lengths = {}
    for name in ("nvlink", "rdma-100", "ethernet-10", "nvme"):
        tokens = lengths[name] = break_even_tokens(roofline, LINKS[name])
        assert tokens is not None
        for length, pays in ((tokens, True), (tokens - 1, False)):
            saved_s = roofline.prompt_s(length, 0) - roofline.prompt_s(1, length - 1)
            assert (move_s(LINKS[name], length * SPEC.shape.kv_bytes) < saved_s) is pays
    assert lengths["nvlink"] < lengths["rdma-100"] < lengths["ethernet-10"]


def test_layers_hide_a_hand_off_as_far_as_the_computation_lasts() -> None:
    roofline = SPEC.roofline()
    for name in ("nvlink", "ethernet-10"):
        moves_s = move_s(LINKS[name], 10_000 * SPEC.shape.kv_bytes)
        assert exposed_s(roofline, LINKS[name], 10_000, layerwise=False) == moves_s
        hidden_s = moves_s - exposed_s(roofline, LINKS[name], 10_000, layerwise=True)
        assert 0 < hidden_s <= roofline.prompt_s(10_000, 0) + 1e-9


def test_reuse_distances_predict_the_hits_of_a_cache_that_holds_every_prompt() -> None:
    trace = [each.block_ids for each in conversations(300, seed=5)]
    distances = reuse_distances(trace)
    for pages in (400, 1000, 3000):
        cache, hits = EngineCache(pages), 0
        for blocks in trace:
            hits += cache.match(blocks)
            cache.store(blocks)
        predicted = sum(distance < pages for distance in distances)
        assert hits == pytest.approx(predicted, rel=0.02, abs=3)


def test_the_least_sizes_for_shares_of_the_hits_grow_and_reach_them() -> None:
    load = workload(list(conversations(500, seed=1)))
    sizes = list(load.curve.items())
    assert [pages for _, pages in sizes] == sorted(pages for _, pages in sizes)
    for share, pages in sizes:
        assert load.hit_ratio_of(pages) + 1e-9 >= share * load.hit_ratio > load.hit_ratio_of(pages - 1) - 1e-9


def test_a_larger_budget_never_saves_less_and_is_not_exceeded() -> None:
    load = workload(list(conversations(500, seed=1)))
    small, large = tier_sizes(SPEC, load, 1_000), tier_sizes(SPEC, load, 20_000)
    assert all(each.price <= 1_000 for each in small)
    assert large[0].saved_s >= small[0].saved_s > 0
    assert tier_sizes(SPEC, load, 1) == []


def uniform(count: int, tokens: int, answer: int) -> list[TraceRequest]:
    blocks = -(-tokens // BLOCK_TOKENS)
    return [
        TraceRequest(100 * number, tokens, answer, tuple(range(number * blocks, (number + 1) * blocks)))
        for number in range(count)
    ]


def rates(spec: ClusterSpec, trace: list[TraceRequest], slo: Slo) -> dict[str, float]:
    return {each.design.name: each.rate for each in make_plan(spec, trace, slo).best}


def test_engines_of_their_own_win_for_long_prompts_over_nvlink_and_lose_for_short_ones_over_a_slow_link() -> None:
    """As DistServe and the vendors of engines report: steps of long prompts delay the tokens of others."""
    near = replace(SPEC, engines_per_host=4)
    long = rates(near, uniform(50, 8000, 200), Slo(2.0, 0.012))
    assert long["disaggregated"] > 1.1 * max(long["co-located"], long["chunked"])
    far = replace(SPEC, engines_per_host=1, fabric="ethernet-10")
    short = rates(far, uniform(50, 1000, 200), Slo(0.3, 0.05))
    assert short["disaggregated"] < 0.9 * max(short["co-located"], short["chunked"])


def test_the_command_recommends_in_words_and_in_a_document() -> None:
    arguments = ["--requests", "20", "--gpus", "2", "--slo", "ttft=2s,tpot=50ms", "--budget", "3000"]
    said = CliRunner().invoke(plan, arguments)
    assert said.exit_code == 0, said.output
    document = json.loads(CliRunner().invoke(plan, [*arguments, "--json"]).stdout)
    assert f"Recommended: {document['recommended']}." in said.stdout
    assert document["kv_bytes_per_token"] == 131_072
    assert {each["name"] for each in document["designs"]} >= {"co-located", "chunked", "disaggregated, pool"}
    assert all(sentence in said.stdout for sentence in document["because"] + document["unknown"])


@pytest.mark.parametrize("text", ["", "ttft=2s", "ttft=2s,tpot=soon", "ttft=0s,tpot=1s", "ttft=2s,tpot=1s,x=3s"])
def test_limits_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_slo(text)
    assert caught.value.field == "slo"


def test_too_few_gpus_for_the_model_are_refused() -> None:
    said = CliRunner().invoke(plan, ["--model", "671b-mla", "--gpus", "8"])
    assert said.exit_code != 0
    assert isinstance(said.exception, InvalidRequest) and said.exception.field == "gpus"
