"""Measures vLLM's time to first token, for new and for known prompts, in vLLM's environment.

``vllm_ttft.py`` starts it. The argument is a JSON object:

- ``model``: a folder; ``settings``: of vLLM;
- ``lengths``: tokens per prompt; ``rounds``: prompts per length;
- ``reset``: whether to empty vLLM's own prefix cache before a prompt is repeated;
- ``packages``: folders to import from, after vLLM's own;
- ``hidden``: a package that vLLM must not search for kernels.

The process prints one line of JSON at its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

SETTLE_S = 0.5  # for connectors that save in the background


def hide(package: str) -> None:
    """Exclude a package when vLLM searches all modules for its kernels. The ``__dict__`` of some attributes of llvmlite
    is not a dict, which ends vLLM 0.32.0 if llvmlite was imported before."""
    from vllm.triton_utils import dispatcher

    search = dispatcher._rebind_kernels

    def search_others(*arguments: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
        try:
            search(*arguments)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = search_others


def main(arguments: dict[str, Any]) -> None:
    """Print how long each prompt takes when it is new and when it is stored, and how many tokens were found."""
    sys.path.extend(arguments.get("packages", ()))
    import numpy as np
    from starting import VLLM_SETTINGS
    from vllm import LLM, SamplingParams

    if arguments.get("hidden"):
        hide(arguments["hidden"])
    longest = max(arguments["lengths"]) + 32
    llm = LLM(
        model=arguments["model"],
        load_format="dummy",
        block_size=32,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=2,
        **VLLM_SETTINGS | arguments["settings"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    random = np.random.default_rng()  # different prompts in every run: a pool may still have earlier ones

    def ask(prompt: list[int]) -> tuple[float, int, int]:
        """Return the seconds, the number of tokens found, and the answer."""
        start_s = time.perf_counter()
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - start_s, answer.num_cached_tokens or 0, answer.outputs[0].token_ids[0]

    rows = []
    for length in arguments["lengths"]:
        ask(random.integers(3, 7000, length).tolist())  # the first prompt of a length allocates buffers
        row: dict[str, Any] = {"length": length, "new_s": [], "known_s": [], "found": [], "equal": True}
        for _ in range(arguments["rounds"]):
            prompt = random.integers(3, 7000, length).tolist()
            new_s, _, token = ask(prompt)
            time.sleep(SETTLE_S)
            if arguments["reset"]:
                llm.reset_prefix_cache()
            known_s, found, again = ask(prompt)
            row["new_s"].append(new_s)
            row["known_s"].append(known_s)
            row["found"].append(found)
            row["equal"] &= token == again
        rows.append(row)
    print(json.dumps({"rows": rows}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # some connectors have threads that do not end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
