"""An engine that answers prompts and tells when each token came: vLLM's, in vLLM's environment, or ours.

Its argument is JSON: ``kind``, one of vllm, direct (our engine, called in this process), grpc (our engine as a daemon,
asked by a client here); ``model``, a folder; ``threads``; ``batch`` and ``tokens``, of prompt and answer, at most. It
prints a line of JSON when it is ready. Then each line of its input is an object with ``prompts`` and ``tokens``, and
each answer a line: ``tokens`` of each prompt, and ``came_s``, the seconds at which they came.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

PAGE_TOKENS = 64
CHUNK_TOKENS = 512  # of prompts in a step
WAIT_S = 100.0

Answers = tuple[list[list[int]], list[list[float]]]
Ask = Callable[[list[list[int]], int], Answers]


def vllm(told: dict[str, Any]) -> Ask:
    """vLLM: its own loop, without the sockets around it."""
    from starting import VLLM_SETTINGS
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=told["model"],
        block_size=PAGE_TOKENS,
        max_model_len=told["tokens"] + PAGE_TOKENS,
        max_num_batched_tokens=CHUNK_TOKENS + told["batch"],
        max_num_seqs=told["batch"],
        enable_prefix_caching=False,
        **VLLM_SETTINGS,
    )

    def ask(prompts: list[list[int]], tokens: int) -> Answers:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = {f"{time.monotonic_ns()}-{number}": number for number in range(len(prompts))}
        drawn: list[list[int]] = [[] for _ in prompts]
        came: list[list[float]] = [[] for _ in prompts]
        start_s = time.monotonic()
        for name, number in names.items():
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompts[number]}, sampling)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                number = names[output.request_id]
                drawn[number] = list(output.outputs[0].token_ids)
                came[number].append(time.monotonic() - start_s)
        return drawn, came

    return ask


def direct(told: dict[str, Any]) -> Ask:
    """Our engine, called by the thread that asks."""
    import queue

    import numpy as np
    import torch

    from engine.compute.models import load_model
    from engine.compute.omp_threads import apart
    from engine.config import EngineConfig
    from engine.model.request import Failed, Finished, Request, Sampling, Token
    from engine.shell.engine import Engine
    from engine.transfer.remote_prefill import Peer

    torch.set_num_threads(told["threads"])
    model = apart(lambda: load_model(told["model"]))  # as the daemon does
    pages = told["batch"] * -(-(told["tokens"] + PAGE_TOKENS) // PAGE_TOKENS)
    config = EngineConfig(
        model=told["model"],
        node="none",
        arena=pages * model.layout(PAGE_TOKENS).page_bytes,
        page_tokens=PAGE_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        batch_max=told["batch"],
        threads=told["threads"],
        keep_pages=0.0,
    )

    def connect(address: str) -> Peer:
        raise AssertionError(f"{address}: an engine alone hands nothing off")

    engine = Engine(config, model, None, connect)
    engine.start()

    def ask(prompts: list[list[int]], tokens: int) -> Answers:
        def came_in(number: int, event: Any) -> None:
            events.put((number, event, time.monotonic()))

        events: queue.SimpleQueue[tuple[int, Any, float]] = queue.SimpleQueue()
        drawn: list[list[int]] = [[] for _ in prompts]
        came: list[list[float]] = [[] for _ in prompts]
        start_s = time.monotonic()
        for number, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=tokens, ignore_eos=True)
            request = Request(id=f"{start_s}-{number}", tokens=np.array(prompt, np.uint32), sampling=sampling)
            engine.submit(request, partial(came_in, number))
        left = len(prompts)
        while left:
            number, event, at_s = events.get(timeout=WAIT_S)
            if isinstance(event, Failed):
                raise event.error
            left -= isinstance(event, Finished)
            if isinstance(event, Token):
                drawn[number].append(event.id)
                came[number].append(at_s - start_s)
        return drawn, came

    return ask


def grpc(told: dict[str, Any]) -> Ask:
    """Our engine as it is served, and a client with a thread per prompt. It ends with its group of processes."""
    import subprocess

    from engine.client import EngineClient
    from engine.model.request import Token

    pages = told["batch"] * -(-(told["tokens"] + PAGE_TOKENS) // PAGE_TOKENS)
    command = [sys.executable, "-m", "kvstore", "engine", "--json", "--node", "none", "--model", told["model"]]
    command += ["--page-tokens", str(PAGE_TOKENS), "--chunk-tokens", str(CHUNK_TOKENS), "--keep-pages", "0"]
    command += ["--batch-max", str(told["batch"]), "--threads", str(told["threads"]), "--arena", f"{2 * pages}MiB"]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    document = ""
    while not document.endswith("\n}\n"):
        line = daemon.stdout.readline()
        assert line, "our engine has ended"
        document += line
    client = EngineClient(json.loads(document)["grpc"][0])
    threads = ThreadPoolExecutor(told["batch"])

    def one(prompt: list[int], tokens: int, start_s: float) -> tuple[list[int], list[float]]:
        drawn, came = [], []
        for event in client.stream(prompt, max_tokens=tokens, ignore_eos=True):
            if isinstance(event, Token):
                drawn.append(event.id)
                came.append(time.monotonic() - start_s)
        return drawn, came

    def ask(prompts: list[list[int]], tokens: int) -> Answers:
        start_s = time.monotonic()
        each = list(threads.map(lambda prompt: one(prompt, tokens, start_s), prompts, timeout=WAIT_S))
        return [drawn for drawn, _ in each], [came for _, came in each]

    return ask


def main(told: dict[str, Any]) -> None:
    """Answer until the input ends."""
    ask = {"vllm": vllm, "direct": direct, "grpc": grpc}[told["kind"]](told)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        drawn, came = ask(asked["prompts"], asked["tokens"])
        print(json.dumps({"tokens": drawn, "came_s": came}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
