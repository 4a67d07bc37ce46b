"""The simulation of a serving cluster: what it conserves, what it computes, and which input it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.conductor.state.conductor_state import ConductorRules
from engine.simulator.cli import simulate
from engine.simulator.cluster import ClusterSpec, EngineCache, read_spec
from engine.simulator.generate import agents, conversations
from engine.simulator.serve import ServeReport, ServeSimulation, report
from engine.simulator.trace import BLOCK_TOKENS, TraceRequest, read_trace
from kvstore.errors import InvalidRequest

SMALL = ClusterSpec(engines=4, engines_per_host=2, dram=32 << 30)
DESIGNS = {
    "co-located": replace(SMALL, pool=False, chunk_tokens=0),
    "chunked": replace(SMALL, pool=False),
    "pool": replace(SMALL, nvme=64 << 30),
    "disaggregated": replace(SMALL, pool=False, prefill=2),
    "disaggregated pool": replace(SMALL, prefill=2, fabric="ethernet-100"),
    "whole": replace(SMALL, prefill=2, layerwise=False),
    "two conductors": replace(SMALL, conductors=2, nvme=64 << 30),
}


def lone(tokens: int, answer: int, at_s: float = 0.0, first_block: int = 0) -> TraceRequest:
    blocks = tuple(range(first_block, first_block + -(-tokens // BLOCK_TOKENS)))
    return TraceRequest(int(at_s * 1e3), tokens, answer, blocks)


def run(spec: ClusterSpec, trace: list[TraceRequest], **rules: object) -> tuple[ServeSimulation, ServeReport]:
    split = "always" if spec.prefill and not spec.pool else "cost"
    said = ConductorRules(**{"policy": "kv-centric" if spec.pool else "own-cache", "split": split, **rules})
    simulation = ServeSimulation(spec, said)
    simulation.run(trace)
    return simulation, report(simulation, said.policy, 2.0, 0.05)


@pytest.mark.parametrize("name", DESIGNS)
def test_a_run_conserves_requests_tokens_pages_and_rates(name: str) -> None:
    spec, trace = DESIGNS[name], list(agents(150, rate=4.0, seed=3))
    simulation, made = run(spec, trace)
    if name == "disaggregated pool":
        assert asdict(run(spec, trace)[1]) == asdict(made), "equal arguments give equal results"
    computed: list[tuple[float, tuple[int, ...]]] = []
    for each in simulation.served:
        assert each.refused == ""
        assert each.arrived_s <= each.sent_s <= each.first_s <= each.end_s
        assert sum(each.cached.values()) < each.input_tokens
        computed.append((each.first_s, each.blocks[: each.input_tokens // BLOCK_TOKENS]))
        known = {block for first_s, blocks in computed[:-1] for block in blocks}
        possible = next((at for at, block in enumerate(each.blocks) if block not in known), len(each.blocks))
        assert sum(each.cached.values()) <= possible * BLOCK_TOKENS, "a page is served only after it was computed"
    assert made.computed + sum(made.hits.values()) == sum(each.input_tokens for each in trace)
    ports = [port for host in simulation.hosts for port in host]
    ports += [port for engine in simulation.engines.values() for port in (engine.host_port, engine.local_port)]
    assert all(port.moved <= port.bytes_per_s * made.seconds * 1.001 for port in ports), "no link exceeds its rate"
    for engine in simulation.engines.values():
        assert engine.kv_used == 0 and not engine.running and not engine.prompts and not engine.joining
        assert engine.prefill_busy_s + engine.decode_busy_s <= made.seconds * 1.001
    assert all(not state.requests for state in simulation.conductors)


def test_a_lone_request_takes_what_the_roofline_says() -> None:
    spec = replace(SMALL, engines=1, pool=False, chunk_tokens=0)
    simulation, _ = run(spec, [lone(6000, 101)])
    (served,), roofline = simulation.served, spec.roofline()
    assert served.ttft_s == pytest.approx(roofline.prompt_s(6000, 0))
    alone_s, each_s = roofline.step_terms(1)
    steps_s = sum(alone_s + each_s * (6001 + step) for step in range(100))
    assert served.end_s - served.first_s == pytest.approx(steps_s, rel=1e-3)


def test_a_chunked_prompt_delays_running_sequences_less_than_one_that_is_computed_at_once() -> None:
    trace = [lone(512, 400), lone(60_000, 2, 0.5, 1000)]
    gaps = {}
    for chunk_tokens in (0, 1024):
        spec = replace(SMALL, engines=1, pool=False, chunk_tokens=chunk_tokens)
        simulation, made = run(spec, trace)
        gaps[chunk_tokens] = max(simulation.engines["e0"].gaps.counts)
        assert made.refused == 0
    assert gaps[1024] < gaps[0] - 50, "at least e times shorter"


def test_a_hand_off_over_a_slow_link_is_later_and_layers_hide_a_part_of_it() -> None:
    first_s = {}
    for fabric in ("rdma-400", "ethernet-10"):
        for layerwise in (True, False):
            spec = replace(
                SMALL, engines=2, engines_per_host=1, prefill=1, pool=False, fabric=fabric, layerwise=layerwise
            )
            simulation, _ = run(spec, [lone(20_000, 2)])
            first_s[fabric, layerwise] = simulation.served[0].ttft_s
    assert first_s["rdma-400", True] < first_s["rdma-400", False] < first_s["ethernet-10", True]
    assert first_s["ethernet-10", True] < first_s["ethernet-10", False]


def test_memory_of_an_engine_bounds_its_batch() -> None:
    spec = replace(SMALL, engines=1, pool=False, gpu="a100", model="7b-mha")
    roofline = spec.roofline()
    tokens = roofline.kv_tokens_max // 2 - 200
    simulation, made = run(spec, [lone(tokens, 100, 0.0, 10_000 * number) for number in range(4)])
    ends = sorted(each.end_s for each in simulation.served)
    firsts = sorted(each.first_s for each in simulation.served)
    assert made.refused == 0
    assert firsts[2] >= ends[0], "the third request waits until the first one has left the memory"


def test_nvme_keeps_what_leaves_dram_and_an_engine_reuses_it() -> None:
    trace = [lone(8192, 2, 3.0 * number, 100 * (number % 5)) for number in range(20)]
    hits = {}
    for nvme in (0, 64 << 30):
        spec = replace(SMALL, engines=1, dram=2 << 30, nvme=nvme, eviction="lru")
        simulation = ServeSimulation(spec)
        simulation.engines["e0"].hbm = EngineCache(0)  # so that only the node has prefixes
        simulation.run(trace)
        hits[nvme] = report(simulation, "kv-centric").hits
    assert hits[0].get("nvme", 0) == 0
    assert hits[64 << 30]["nvme"] > 10 * 8000


def test_conductors_refuse_what_would_miss_its_limits_and_refusals_are_no_goodput() -> None:
    trace = list(conversations(300, rate=60.0, seed=1))
    simulation, made = run(SMALL, trace, first_token_s=1.0, token_s=0.05)
    refused = sum(bool(each.refused) for each in simulation.served)
    assert made.refused == refused > 30
    assert made.good <= made.requests - refused


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("gpu=h999", "gpu"),
        ("engines=0", "engines"),
        ("engines=4,prefill=4", "prefill"),
        ("dram=1KiB", "dram"),
        ("model=70b-gqa,gpus=1", "gpus"),
        ("fabric=carrier-pigeon", "fabric"),
        ("horses=4", "cluster"),
        ("pool=perhaps", "pool"),
        ("engines=many", "engines"),
        ("eviction=best", "policy"),
        ("/does/not/exist.toml", "cluster"),
    ],
)
def test_an_impossible_cluster_is_refused_by_the_name_of_its_field(text: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_spec(text)
    assert caught.value.field == field


def test_a_cluster_may_be_described_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('engines = 6\nprefill = 2\ndram = "64GiB"\npool = true\n')
    assert read_spec(str(path)) == replace(ClusterSpec(), engines=6, prefill=2, dram=64 << 30)


def dynamo_line(at_ms: int, hashes: list[int], tokens: int, answer: int) -> str:
    replay = {"trace_block_size": 128, "input_length": tokens, "input_sequence_hashes": hashes}
    about = {"request_id": "r", "request_received_ms": at_ms, "output_tokens": answer, "replay": replay}
    return json.dumps({"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": about})


def test_requests_that_dynamo_recorded_are_sorted_and_their_blocks_joined(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tool = json.dumps({"schema": "dynamo.request.trace.v1", "event_type": "tool_end"})
    lines = [dynamo_line(5_000, [1, 2, 3, 4, 5, 6], 700, 9), tool, dynamo_line(4_000, [1, 2, 3, 4, 9], 600, 8)]
    path.write_text("\n".join(lines) + "\n")
    first, second = read_trace(path)
    assert (first.timestamp_ms, first.input_tokens, first.output_tokens) == (0, 600, 8)
    assert second.timestamp_ms == 1_000
    assert first.block_ids[0] == second.block_ids[0] and first.block_ids[1] != second.block_ids[1]


def test_sessions_of_agents_have_hashes_of_their_own(tmp_path: Path) -> None:
    inner = {"t": 2.0, "type": "n", "in": 512, "out": 3, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8]}
    outer = {"t": 0.5, "type": "n", "in": 600, "out": 4, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}
    session = {"id": "a", "block_size": 64, "hash_id_scope": "local",
               "requests": [outer, {"type": "subagent", "t": 1.0, "requests": [inner]}]}  # fmt: skip
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps(session) + "\n" + json.dumps(session) + "\n")
    one, two, three, four = read_trace(path)
    assert one.block_ids[0] == two.block_ids[0], "a subagent repeats the prompt of its parent"
    assert three.block_ids == (max(one.block_ids) + 1, max(one.block_ids) + 2)
    assert [each.timestamp_ms for each in (one, two, three, four)] == [0, 1500, 10_000, 11_500]


@pytest.mark.parametrize(
    "line",
    [
        '{"schema": "another.v2"}',
        '{"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {}}',
        dynamo_line(0, [1], 700, 1),
        '{"requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]}',
        '{"block_size": 48, "requests": [{"t": 0, "in": 48, "out": 1, "hash_ids": [1]}]}',
        '{"block_size": 64, "requests": [{"t": -1, "in": 64, "out": 1, "hash_ids": [1]}]}',
        '{"block_size": 64, "requests": [7]}',
    ],
)
def test_a_bad_line_of_another_format_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InvalidRequest) as caught:
        list(read_trace(path))
    assert caught.value.field.startswith("trace.jsonl:1")


def test_the_command_prints_the_same_document_twice_and_draws_a_timeline(tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    arguments = ["serve", "--generate", "conversations", "--requests", "30", "--cluster", "engines=2",
                 "--slo", "ttft=2s,tpot=50ms", "--policy", "kv-centric,random", "--json"]  # fmt: skip
    one = CliRunner().invoke(simulate, [*arguments, "--timeline", str(picture)])
    assert one.exit_code == 0, one.output
    assert one.stdout == CliRunner().invoke(simulate, arguments).stdout
    assert [each["policy"] for each in json.loads(one.stdout)["policies"]] == ["kv-centric", "random"]
    assert (tmp_path / "run-random.png").read_bytes().startswith(b"\x89PNG")
