"""A vLLM engine as a process of its own, in vLLM's environment: it answers prompts that are told line by line.

A line is JSON: ``prompts``, lists of token ids, their ``salt``, and ``tokens``, how many each answer has. The answer
is a line with ``event`` ``answered``: ``tokens`` of each, ``cached``, how many of each prompt's tokens were, and
``took_s``. Its own prefix cache is empty afterwards.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def say(event: str, **about: Any) -> None:
    """One line, for who has started this."""
    print(json.dumps({"event": event, **about}), flush=True)


def main(model: str, transfer: str, settings: str) -> None:
    """Until its input ends. ``transfer``: JSON of ``kv_transfer_config``, or "". ``settings``: JSON of others."""
    from vllm import LLM, SamplingParams

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
            kv_transfer_config=json.loads(transfer) if transfer else None,
            **json.loads(settings),
        )
    except (ValueError, RuntimeError) as error:
        say("refused", why=str(error))
        raise SystemExit(3) from None
    say("ready")
    for line in sys.stdin:
        told = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=told["tokens"], ignore_eos=True, detokenize=False)
        start_s = time.monotonic()
        salted = {"cache_salt": told["salt"]} if told["salt"] else {}
        asked = [{"prompt_token_ids": each, **salted} for each in told["prompts"]]
        answers = llm.generate(asked, sampling, use_tqdm=False)
        took_s = time.monotonic() - start_s
        llm.reset_prefix_cache()
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        say("answered", tokens=tokens, cached=[answer.num_cached_tokens for answer in answers], took_s=took_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
