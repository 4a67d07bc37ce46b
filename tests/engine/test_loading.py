"""What an engine loads of a prompt, wherever in the pool it lies, and however its own frames lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.memory.arena import Arena
from engine.memory.staging import HostStaging, Stagings
from engine.model.request import Request, Sampling
from engine.pool import store
from engine.pool.loading import PrefixLoader
from engine.pool.work import Work
from tests.helpers.content import LARGE, chain, contents, first_wrong, prompt
from tests.helpers.pool import patient
from tests.helpers.processes import Machine, put, wait_until

PAGES, OWN, SHARED = 24, 7, 2
FRAMES = (5, 6, 20, 3, 4, 40, 41, 42, 43, 9, 8, 7, 30, 31, 11, 12, 13, 14, 15, 16, 50, 52, 54, 56)


@pytest.mark.parametrize("shared", [0, SHARED])
def test_frames_that_lie_apart_take_what_other_nodes_have(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    patient(monkeypatch)
    for name in "ab":
        machine.serve(name, dram="64MiB", catalog=f"file:{tmp_path / 'catalog'}")
    far, near = (machine.connect(name) for name in "ab")
    put(far, 1, PAGES, LARGE)
    put(near, 1, OWN, LARGE)
    cache = near.cache(LARGE)
    wait_until("the far pages are found", lambda: cache.lookup(prompt(1, PAGES, LARGE)).pages == PAGES, 60)

    arena = Arena(LARGE, 64, LARGE.head_dim)
    pool = store.Pool(near, [LARGE], Stagings(arena, [HostStaging(arena)]))
    request = Request(id="r", tokens=prompt(1, PAGES, LARGE), sampling=Sampling())
    work = Work(1, request, lambda event: None, None, LARGE.page_tokens, pool.cache("", ""), False)
    work.frames, work.shared_pages = torch.tensor([FRAMES]), shared
    asked: list[int] = []
    real = type(cache).lookup
    monkeypatch.setattr(type(cache), "lookup", lambda self, keys: asked.append(len(keys)) or real(self, keys))
    assert PrefixLoader(pool).load(work) == PAGES * LARGE.page_tokens
    assert asked == [PAGES - shared]
    assert work.cost.cached == {"dram": (PAGES - shared) * LARGE.page_tokens}
    rows = arena.pages[torch.tensor(FRAMES)].reshape(PAGES, -1).view(torch.uint8).numpy()
    assert first_wrong(rows[shared:], contents(chain(1, PAGES, LARGE), LARGE)[shared:]) == ""
    assert not arena.pages[list(FRAMES[:shared])].any(), "who shares a frame does not write there"
