"""LMCache's second level as a process of its own, in LMCache's environment: told line by line what to do with chunks.

A line is JSON: ``do`` is store, lookup, load or delete; ``first`` and ``count`` name chunks, ``salt`` is theirs. The
answer is a line with ``done``, of each chunk whether that was done, and ``right``, of each whether it has its content.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

ELEMENTS = 64 << 10
ANSWER_S = 30.0


def chunk(fill: torch.Tensor) -> TensorMemoryObj:
    """One of LMCache's, over this memory."""
    about = MemoryObjMetadata(fill.shape, fill.dtype, 0, fill.nbytes, 1, 0, MemoryFormat.KV_2LTD)
    return TensorMemoryObj(fill, about, parent_allocator=None)


def content(number: int) -> torch.Tensor:
    """Of a chunk."""
    return torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(number))


def ended(adapter: Any, fd: int, ask: Any) -> Any:
    """What came of a task, when its event tells that it has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (result := ask()) is None:
        if not poll.poll(ANSWER_S * 1000):
            raise TimeoutError
        consume_fd(fd)
    return result


def main(spec: str) -> None:
    """Until its input ends."""
    (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec])).adapters
    adapter = create_l2_adapter(config)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        numbers = range(told["first"], told["first"] + told["count"])
        keys = [ObjectKey(b"%032d" % number, "a/model", 1, 2, told["salt"]) for number in numbers]
        memory = [content(number) if told["do"] == "store" else torch.zeros(ELEMENTS) for number in numbers]
        done = [True] * len(keys)
        if told["do"] == "store":
            task = adapter.submit_store_task(keys, [chunk(each) for each in memory])
            stored = ended(adapter, adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks() or None)
            done = [stored[task].is_successful()] * len(keys)
        elif told["do"] == "delete":
            adapter.delete(keys)
        elif told["do"] == "lookup":
            task = adapter.submit_lookup_and_lock_task(keys, {})
            fd = adapter.get_lookup_and_lock_event_fd()
            found = ended(adapter, fd, lambda task=task: adapter.query_lookup_and_lock_result(task))
            done = [found.test(i) for i in range(len(keys))]
            adapter.submit_unlock(keys)
        else:
            task = adapter.submit_load_task(keys, [chunk(each) for each in memory])
            loaded = ended(adapter, adapter.get_load_event_fd(), lambda task=task: adapter.query_load_result(task))
            done = [loaded.test(i) for i in range(len(keys))]
        right = [torch.equal(each, content(number)) for each, number in zip(memory, numbers, strict=True)]
        print(json.dumps({"done": done, "right": right, "used": adapter.get_usage().total_bytes_used}), flush=True)
    adapter.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
