"""Answers prompts with one engine, and reports when each token arrived. ``decode_step.py`` starts it.

The argument is a JSON object:

- ``kind``: ``vllm`` (in vLLM's environment), ``direct`` (our engine, called in this process) or ``grpc`` (our engine as
  a daemon, with a client in this process);
- ``model``: a folder; ``threads``: of the engine;
- ``batch``: the most prompts at once; ``tokens``: the most tokens of a prompt and its answer.

The process prints one line of JSON when it is ready. Then it reads lines of JSON with ``prompts`` and ``tokens``, and
answers each with a line: the ``tokens`` of each answer, and ``arrivals_s``, the second at which each token arrived.
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
CHUNK_TOKENS = 512  # prompt tokens per step
WAIT_S = 100.0

Answers = tuple[list[list[int]], list[list[float]]]
Ask = Callable[[list[list[int]], int], Answers]


def vllm(arguments: dict[str, Any]) -> Ask:
    """Start vLLM's engine loop, without its servers and sockets."""
    from starting import VLLM_SETTINGS
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments["model"],
        block_size=PAGE_TOKENS,
        max_model_len=arguments["tokens"] + PAGE_TOKENS,
        max_num_batched_tokens=CHUNK_TOKENS + arguments["batch"],
        max_num_seqs=arguments["batch"],
        enable_prefix_caching=False,
        **VLLM_SETTINGS,
    )

    def ask(prompts: list[list[int]], tokens: int) -> Answers:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = {f"{time.monotonic_ns()}-{number}": number for number in range(len(prompts))}
        token_ids: list[list[int]] = [[] for _ in prompts]
        arrivals_s: list[list[float]] = [[] for _ in prompts]
        start_s = time.monotonic()
        for name, number in names.items():
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompts[number]}, sampling)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                number = names[output.request_id]
                token_ids[number] = list(output.outputs[0].token_ids)
                arrivals_s[number].append(time.monotonic() - start_s)
        return token_ids, arrivals_s

    return ask


def direct(arguments: dict[str, Any]) -> Ask:
    """Start our engine in this process; the asking thread calls it."""
    import queue

    import numpy as np
    import torch

    from engine.compute.models import load_model
    from engine.compute.omp_threads import run_in_own_thread
    from engine.config import EngineConfig
    from engine.model.request import Failed, Finished, Request, Sampling, Token
    from engine.shell.engine import Engine
    from engine.transfer.remote_prefill import Peer

    torch.set_num_threads(arguments["threads"])
    model = run_in_own_thread(lambda: load_model(arguments["model"]))  # in its own threads, as in the daemon
    pages = arguments["batch"] * -(-(arguments["tokens"] + PAGE_TOKENS) // PAGE_TOKENS)
    config = EngineConfig(
        model=arguments["model"],
        node="none",
        arena=pages * model.layout(PAGE_TOKENS).page_bytes,
        page_tokens=PAGE_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        batch_max=arguments["batch"],
        threads=arguments["threads"],
        keep_pages=0.0,
    )

    def connect(address: str) -> Peer:
        raise AssertionError(f"{address}: a single engine has no peer")

    engine = Engine(config, model, None, connect)
    engine.start()

    def ask(prompts: list[list[int]], tokens: int) -> Answers:
        def receive(number: int, event: Any) -> None:
            events.put((number, event, time.monotonic()))

        events: queue.SimpleQueue[tuple[int, Any, float]] = queue.SimpleQueue()
        token_ids: list[list[int]] = [[] for _ in prompts]
        arrivals_s: list[list[float]] = [[] for _ in prompts]
        start_s = time.monotonic()
        for number, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=tokens, ignore_eos=True)
            request = Request(id=f"{start_s}-{number}", tokens=np.array(prompt, np.uint32), sampling=sampling)
            engine.submit(request, partial(receive, number))
        unfinished = len(prompts)
        while unfinished:
            number, event, at_s = events.get(timeout=WAIT_S)
            if isinstance(event, Failed):
                raise event.error
            unfinished -= isinstance(event, Finished)
            if isinstance(event, Token):
                token_ids[number].append(event.id)
                arrivals_s[number].append(at_s - start_s)
        return token_ids, arrivals_s

    return ask


def grpc(arguments: dict[str, Any]) -> Ask:
    """Start our engine as a daemon, and a client with one thread per prompt. The daemon ends with this process
    group."""
    import subprocess

    from engine.client import EngineClient
    from engine.model.request import Token

    pages = arguments["batch"] * -(-(arguments["tokens"] + PAGE_TOKENS) // PAGE_TOKENS)
    command = [sys.executable, "-m", "kvstore", "engine", "--json", "--node", "none", "--model", arguments["model"]]
    command += ["--page-tokens", str(PAGE_TOKENS), "--chunk-tokens", str(CHUNK_TOKENS), "--keep-pages", "0"]
    command += [
        "--batch-max",
        str(arguments["batch"]),
        "--threads",
        str(arguments["threads"]),
        "--arena",
        f"{2 * pages}MiB",
    ]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    document = ""
    while not document.endswith("\n}\n"):
        line = daemon.stdout.readline()
        assert line, "our engine ended before it was ready"
        document += line
    client = EngineClient(json.loads(document)["grpc"][0])
    threads = ThreadPoolExecutor(arguments["batch"])

    def answer_one(prompt: list[int], tokens: int, start_s: float) -> tuple[list[int], list[float]]:
        token_ids, arrivals_s = [], []
        for event in client.stream(prompt, max_tokens=tokens, ignore_eos=True):
            if isinstance(event, Token):
                token_ids.append(event.id)
                arrivals_s.append(time.monotonic() - start_s)
        return token_ids, arrivals_s

    def ask(prompts: list[list[int]], tokens: int) -> Answers:
        start_s = time.monotonic()
        answers = list(threads.map(lambda prompt: answer_one(prompt, tokens, start_s), prompts, timeout=WAIT_S))
        return [token_ids for token_ids, _ in answers], [arrivals_s for _, arrivals_s in answers]

    return ask


def main(arguments: dict[str, Any]) -> None:
    """Answer requests until the input ends."""
    ask = {"vllm": vllm, "direct": direct, "grpc": grpc}[arguments["kind"]](arguments)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        token_ids, arrivals_s = ask(request["prompts"], request["tokens"])
        print(json.dumps({"tokens": token_ids, "arrivals_s": arrivals_s}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
