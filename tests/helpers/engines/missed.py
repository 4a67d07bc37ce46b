"""Pages that the pool missed, because it was away, and that a ring of frames has overwritten since."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from engine.shell.engine import Engine
from tests.helpers.engines.tokens import Lab, check_answer, prompt


def check_missed_pages(lab: Lab, one: Engine, count: int, stops: Iterable[int]) -> None:
    """The pool comes back in the middle of an answer of ``count`` tokens: it is given no page in the name of another
    one. Who asks for the beginning of it, up to each of ``stops``, is answered right; the first one finds nothing."""
    one.pool._failed_s, one.pool.up = math.inf, False  # who looks for it does not see it
    asked = lab.ask(one, prompt(40, 100), count).wait(100)
    one.pool.up = True
    check_answer(asked)
    history = np.concatenate([prompt(40, 100), np.array(asked.tokens, np.uint32)])
    for index, stop in enumerate(stops):
        answer = lab.answers(one, [history[:stop]], 5)[0]
        assert index or not answer.cached
