"""A vLLM engine as a process of its own, in vLLM's environment: it answers prompts that are told line by line.

A line is JSON: ``prompts``, lists of token ids, their ``salt``, ``tokens``, how many each answer has, ``params``, which
a proxy would pass as ``kv_transfer_params``, ``reset``: whether the connector is reset afterwards, too, and ``sleep``:
at which level the engine sleeps then, before it is woken; none: -1. Where there
is ``abort``, all are aborted after so many steps, and ``event`` is ``aborted``. The answer is a line with ``event``
``answered``: ``tokens`` of each, ``cached``, how many of each prompt's tokens were, ``took_s``, ``reset``, whether it
succeeded, and ``metrics``, the connector's counters. Its own prefix cache is empty afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

RESET_S = 30.0


def say(event: str, **about: Any) -> None:
    """One line, for who has started this."""
    print(json.dumps({"event": event, **about}), flush=True)


def metrics() -> dict[str, float]:
    """Of the connector, by name, as /metrics has them."""
    from prometheus_client import REGISTRY

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return {each.name: each.value for each in samples if each.name.startswith("vllm:kvstore_")}


def abort(engine: Any, prompts: list[list[int]], sampling: Any, steps: int) -> None:
    """Requests that are aborted after so many steps."""
    names = [f"aborted-{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    for _ in range(steps):
        engine.step()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()


def lend(packages: str) -> None:
    """Have vLLM find LMCache's packages in a folder, after its own."""
    from bench.peers.vllm_engine import hide

    sys.path.append(packages)
    hide("llvmlite")


def main(model: str, transfer: str, settings: str) -> None:
    """Until its input ends. ``transfer``: JSON of ``kv_transfer_config``, or "". ``settings``: JSON of others."""
    if packages := os.environ.get("WORKER_PACKAGES"):
        lend(packages)
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig

    others = json.loads(settings)
    if "kv_events_config" in others:
        others["kv_events_config"] = KVEventsConfig(**others["kv_events_config"])
    try:
        llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=32,
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            disable_log_stats=False,
            kv_transfer_config=json.loads(transfer) if transfer else None,
            **others,
        )
    except (ValueError, RuntimeError) as error:
        say("refused", why=str(error))
        raise SystemExit(3) from None
    say("ready")
    for line in sys.stdin:
        told = json.loads(line)
        passed = {"kv_transfer_params": told["params"]} if told.get("params") else None
        sampling = SamplingParams(
            temperature=0, max_tokens=told["tokens"], ignore_eos=True, detokenize=False, extra_args=passed
        )
        if "abort" in told:
            abort(llm.llm_engine, told["prompts"], sampling, told["abort"])
            deadline_s = time.monotonic() + RESET_S
            while not llm.reset_prefix_cache():  # what is still being loaded has its blocks
                assert time.monotonic() < deadline_s, "blocks were not given back"
                llm.llm_engine.step()
            say("aborted")
            continue
        start_s = time.monotonic()
        salted = {"cache_salt": told["salt"]} if told["salt"] else {}
        asked = [{"prompt_token_ids": each, **salted} for each in told["prompts"]]
        answers = llm.generate(asked, sampling, use_tqdm=False)
        took_s = time.monotonic() - start_s
        reset = llm.reset_prefix_cache(reset_connector=told.get("reset", False))
        if (level := told.get("sleep", -1)) >= 0:
            llm.sleep(level)
            assert llm.llm_engine.is_sleeping()
            llm.wake_up()
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        cached = [answer.num_cached_tokens for answer in answers]
        say("answered", tokens=tokens, cached=cached, took_s=took_s, reset=reset, metrics=metrics())


if __name__ == "__main__":
    main(*sys.argv[1:])
