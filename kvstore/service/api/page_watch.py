"""PageWatch: WatchPages, by which a conductor is told what pages a node has, as an owner of the directory is."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Final

from kvstore.errors import TooManyCalls
from kvstore.pb import store_pb2 as pb
from kvstore.service.node.node import Node
from kvstore.service.node.page_feed import PageFeed
from kvstore.serving.gate import Call, parse
from kvstore.state.announcing import LOOK_S, Announcing
from kvstore.state.directory import Told

WATCHERS_MAX: Final = 16  # each may keep what the node has, and ``announcing.QUEUED_MAX`` changes, 9 bytes a page
RETRY_AFTER_S: Final = 1.0
BATCHES: Final = 16  # sent between two looks at the event log, which forgets what was not looked at for long
END_S: Final = 0.5  # before the deadline: a watch ends well
READER: Final = "reader"


class PageWatch:
    """All watchers of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._watchers = 0

    async def pages(self, call: Call, message: bytes) -> None:
        """Everything the node has, then each change. A batch is made when the one before was taken."""
        parse(pb.Empty, message)
        call.caller.check_operator()
        if self._watchers >= WATCHERS_MAX:
            raise TooManyCalls(f"{WATCHERS_MAX} callers watch pages already", RETRY_AFTER_S)
        self._watchers += 1
        try:
            await self._tell(call)
        finally:
            self._watchers -= 1

    async def _tell(self, call: Call) -> None:
        announcing = Announcing(self._node.folder.name, lambda: secrets.randbits(63))
        announcing.members([READER])
        feed = PageFeed(self._node, announcing, Counter())
        while call.left_s > END_S:
            await call.quick(feed.follow)
            for _ in range(BATCHES):
                batch = announcing.batch(READER)
                if batch is None:
                    break
                await call.send(_message(batch))
                announcing.answered(READER, batch, batch.number + 1)
            if not announcing.queued:
                call.check()
                with call.waits():
                    await asyncio.sleep(LOOK_S)


def _message(batch: Told) -> bytes:
    said = pb.PageBatch(
        stream=batch.stream,
        number=batch.number,
        fingerprints=batch.fingerprints.astype("<u8").tobytes(),
        marks=batch.marks.tobytes(),
        whole=batch.whole,
    )
    return said.SerializeToString()
