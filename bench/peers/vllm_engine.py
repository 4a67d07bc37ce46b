"""An engine of vLLM, in vLLM's environment: how long prompts take to their first token, new ones and known ones.

Its argument is JSON: ``model``, a folder; ``settings`` of vLLM; ``packages``, folders to import from, after its own;
``lengths`` of prompts in tokens; ``rounds``; ``reset``, whether vLLM's own prefix cache is emptied before a prompt
comes again; ``hidden``, a package in which vLLM is not to look for its kernels. It prints one line of JSON at its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

SETTLE_S = 0.5  # connectors may save in the background


def hide(package: str) -> None:
    """Have vLLM pass over a package when it looks for its kernels in all modules: llvmlite's attributes have no
    ``__dict__`` that is one, and end vLLM 0.32.0 if it was imported before."""
    from vllm.triton_utils import dispatcher

    search = dispatcher._rebind_kernels

    def search_others(*told: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
        try:
            search(*told)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = search_others


def main(told: dict[str, Any]) -> None:
    """Print seconds of each prompt when it was new and when it was known, and how many tokens were found then."""
    sys.path.extend(told.get("packages", ()))
    import numpy as np
    from starting import VLLM_SETTINGS
    from vllm import LLM, SamplingParams

    if told.get("hidden"):
        hide(told["hidden"])
    longest = max(told["lengths"]) + 32
    llm = LLM(
        model=told["model"],
        load_format="dummy",
        block_size=32,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=2,
        **VLLM_SETTINGS | told["settings"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    random = np.random.default_rng()  # others than in earlier runs, which a pool may still have

    def ask(prompt: list[int]) -> tuple[float, int, int]:
        """Seconds, tokens found, and the answer."""
        start_s = time.perf_counter()
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - start_s, answer.num_cached_tokens or 0, answer.outputs[0].token_ids[0]

    rows = []
    for length in told["lengths"]:
        ask(random.integers(3, 7000, length).tolist())  # the first of a length makes buffers
        row: dict[str, Any] = {"length": length, "new_s": [], "known_s": [], "found": [], "equal": True}
        for _ in range(told["rounds"]):
            prompt = random.integers(3, 7000, length).tolist()
            new_s, _, token = ask(prompt)
            time.sleep(SETTLE_S)
            if told["reset"]:
                llm.reset_prefix_cache()
            known_s, found, again = ask(prompt)
            row["new_s"].append(new_s)
            row["known_s"].append(known_s)
            row["found"].append(found)
            row["equal"] &= token == again
        rows.append(row)
    print(json.dumps({"rows": rows}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of some connectors do not end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
