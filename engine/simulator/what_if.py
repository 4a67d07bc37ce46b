"""What-if: the designs of one cluster at any rate, from the text of a query; for pages and for ``kvstore plan``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from engine.simulator.cluster import ClusterSpec, with_values
from engine.simulator.estimate import Estimate, Traffic, estimate, estimated_goodput, variants
from engine.simulator.hardware import LINKS
from engine.simulator.plan import Slo, break_even_tokens, links_of
from kvstore.errors import InvalidRequest

POINTS: Final = 24  # of a curve
QUERY_MAX: Final = 4096  # characters
GIB: Final = 1 << 30

# The numbers of a query: name, default, least and greatest value.
NUMBERS: Final[Mapping[str, tuple[float, float, float]]] = {
    "gpus": (8, 1, 4096),
    "input": (8000, 1, 1_000_000),
    "output": (300, 1, 100_000),
    "spread": (1.0, 0.0, 10.0),
    "hits": (0.5, 0.0, 0.99),
    "half": (256, 1, 1_000_000),
    "rate": (4.0, 0.001, 100_000.0),
    "ttft": (2.0, 0.001, 600.0),
    "tpot": (0.05, 0.0001, 60.0),
    "dram": (512, 1, 65_536),
    "nvme": (0, 0, 1 << 20),
    "chunk": (2048, 0, 65_536),
    "batch": (256, 1, 4096),
    "hosts": (8, 1, 64),
}
TEXTS: Final[Mapping[str, str]] = {
    "model": "8b-gqa",
    "gpu": "h100",
    "fabric": "rdma-400",
    "layers": "on",
    "caching": "on",
}
MEANING: Final[Mapping[str, str]] = {
    "model": "model",
    "gpu": "kind of GPU",
    "fabric": "link between hosts",
    "gpus": "GPUs",
    "input": "tokens of a prompt",
    "output": "tokens of an answer",
    "spread": "squared coefficient of variation of prompts",
    "hits": "share of the prompts' tokens that repeat",
    "half": "GiB of memory that half of the possible hits need",
    "rate": "requests per second",
    "ttft": "limit for the time to the first token, s",
    "tpot": "limit for the time of later tokens, s",
    "dram": "GiB of DRAM per host",
    "nvme": "GiB of NVMe per host",
    "chunk": "tokens of a prompt per step; 0 computes it at once",
    "batch": "sequences that an engine decodes together",
    "hosts": "engines per host",
    "layers": "hand over KV layer by layer",
    "caching": "reuse prefixes",
}


def read_query(query: str) -> dict[str, Any]:
    """Parse ``model=8b-gqa&input=8000..``; missing names have their defaults.

    Raises:
        InvalidRequest: a name or a value is not valid.
    """
    if len(query) > QUERY_MAX:
        raise InvalidRequest("query", f"must have at most {QUERY_MAX} characters (got {len(query)})")
    values: dict[str, Any] = {**TEXTS, **{name: default for name, (default, _, _) in NUMBERS.items()}}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in TEXTS:
            values[name] = text
        elif name in NUMBERS:
            values[name] = _number(name, text)
        else:
            raise InvalidRequest("query", f"must have names of {', '.join(values)} (got {name!r})")
    for name in ("layers", "caching"):
        if values[name] not in ("on", "off"):
            raise InvalidRequest(name, f"must be on or off (got {values[name]!r})")
    return values


def _number(name: str, text: str) -> float:
    _, least, greatest = NUMBERS[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= greatest:
        raise InvalidRequest(name, f"must be a number from {least:g} to {greatest:g} (got {text!r})")
    return value


def _link(values: Mapping[str, Any]) -> str:
    return urlencode({name: value if isinstance(value, str) else f"{value:.6g}" for name, value in values.items()})


def what_if(query: str) -> dict[str, Any]:
    """Return what each design does, as a JSON document.

    Raises:
        InvalidRequest: the query is not valid, or the GPUs do not hold the model.
    """
    values = read_query(query)
    spec, traffic = _spec(values), _traffic(values)
    slo, rate = Slo(values["ttft"], values["tpot"]), values["rate"]
    designs = variants(spec, traffic, slo)
    goodputs = {name: estimated_goodput(each, traffic, slo) for name, each in designs.items()}
    top = max(1.2 * max(goodputs.values()), 1.2 * rate)
    rates = [top * (number + 1) / POINTS for number in range(POINTS)]
    roofline, tokens = spec.roofline(), round(values["input"])
    names = sorted(designs, key=lambda name: (-round(goodputs[name], 3), list(designs).index(name)))
    return {
        "query": (link := _link(values)),
        "command": f"kvstore plan --what-if '{link}'",
        "engines": spec.engines,
        "gpus_of_engine": spec.gpus_of_engine,
        "kv_bytes_per_token": spec.shape.kv_bytes,
        "prompt_s": roofline.prompt_s(tokens, 0),
        "break_even_tokens": break_even_tokens(roofline, LINKS[spec.fabric], spec.adapters),
        "links": links_of(spec, tokens),
        "designs": [
            {
                "name": name,
                "prefill": designs[name].prefill,
                "goodput": goodputs[name],
                **_document(estimate(designs[name], traffic, rate)),
                "curve": [_point(estimate(designs[name], traffic, each)) for each in rates],
            }
            for name in names
        ],
        "rates": rates,
        "recommended": names[0] if goodputs[names[0]] else "none",
        "because": _sentence(values, spec, designs, goodputs, names, traffic),
    }


def _spec(values: Mapping[str, Any]) -> ClusterSpec:
    spec = with_values(ClusterSpec(), {name: values[name] for name in ("model", "gpu", "fabric")})
    engines = int(values["gpus"]) // spec.gpus_of_engine
    if not engines:
        reason = f"must be at least {spec.gpus_of_engine}, which one engine needs (got {values['gpus']:g})"
        raise InvalidRequest("gpus", reason)
    return replace(
        spec, engines=engines, engines_per_host=int(values["hosts"]), chunk_tokens=int(values["chunk"]),
        batch_max=int(values["batch"]), layerwise=values["layers"] == "on", dram=int(values["dram"] * GIB),
        nvme=int(values["nvme"] * GIB),
    )  # fmt: skip


def _traffic(values: Mapping[str, Any]) -> Traffic:
    hit_ratio = values["hits"] if values["caching"] == "on" else 0.0
    return Traffic(
        input_tokens=values["input"], output_tokens=values["output"], spread=values["spread"], hit_ratio=hit_ratio,
        half_bytes=values["half"] * GIB,
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _document(made: Estimate) -> dict[str, Any]:
    return {
        "ttft_mean": _finite(made.ttft_mean), "ttft_p90": _finite(made.ttft_p90), "tpot": _finite(made.tpot),
        "gap_max": _finite(made.gap_max), "hit_ratio": made.hit_ratio, "limit": made.limit, "busy": made.busy,
        "batch": made.batch, "parts": {name: _finite(value) for name, value in made.parts.items()},
    }  # fmt: skip


def _point(made: Estimate) -> list[float | None]:
    """Return the 90th percentile of first tokens and the mean of later ones; None above the capacity."""
    return [None, None] if made.limit else [_finite(made.ttft_p90), _finite(made.tpot)]


def _sentence(
    values: Mapping[str, Any], spec: ClusterSpec, designs: Mapping[str, ClusterSpec], goodputs: Mapping[str, float],
    names: list[str], traffic: Traffic,
) -> str:  # fmt: skip
    best = names[0]
    prompt_s = spec.roofline().prompt_s(values["input"], 0)
    if not goodputs[best]:
        return (
            f"No design meets the limits: a prompt of {values['input']:,.0f} tokens takes {prompt_s:.2f} s to compute, "
            f"and the limit is {values['ttft']:g} s."
        )
    made = estimate(designs[best], traffic, values["rate"])
    second = names[1] if len(names) > 1 else best
    parts = f"{best} serves {goodputs[best]:.1f} requests/s within the limits, {second} {goodputs[second]:.1f}."
    if made.limit:
        return f"{parts} {values['rate']:g} requests/s are too many: {made.limit} is used up first."
    longest = max(("wait", "load", "compute", "hand-off"), key=lambda part: made.parts[part])
    return (
        f"{parts} At {values['rate']:g} requests/s the first token takes {made.ttft_mean:.2f} s on average, most of it "
        f"to {_VERBS[longest]}, and {made.hit_ratio:.0%} of the tokens of prompts are reused."
    )


_VERBS: Final = {
    "wait": "wait for an engine", "load": "load the prefix", "compute": "compute the prompt", "hand-off": "move KV",
}  # fmt: skip
