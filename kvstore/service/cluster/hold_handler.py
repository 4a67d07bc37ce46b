"""HoldHandler: answers HOLD, which pages of a chain this node has itself, from the node's own index."""

from __future__ import annotations

import numpy as np

from kvstore.client.local.node import LocalNode
from kvstore.client.local.stored import tiers_by_page
from kvstore.model.prefix import Keys
from kvstore.state.directory import TIERS, Listed
from kvstore.transfer.base import Exchange
from kvstore.transfer.find_messages import pack_found, unpack_hold
from kvstore.transfer.wire import FrameKind

NO_TOKENS = np.zeros(0, np.uint32)


class HoldHandler:
    """The handler of HOLD of one node. Threads share it.

    A key that is asked for gets the tag of the root that the caller names and may read, so that it finds no other
    root's page. Nothing is proven: pages are, when they are read.
    """

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """See ``Handler``. Raises PermissionDenied where these pages are not the caller's."""
        whose, links, closed = unpack_hold(body)
        exchange.caller.check_salt(whose.salt)
        mapped, tiers = self._node.mapped(), dict[int, int]()
        if mapped is not None and links:
            keys = mapped.in_pool(Keys(1, whose.root, whose.root, links, NO_TOKENS, None))
            tiers = {page: TIERS.index(tier) for page, tier in tiers_by_page(mapped, keys, closed).items()}
        pages = np.array(sorted(tiers), np.int64)
        ranks = np.array([tiers[page] for page in pages.tolist()], np.uint8)
        listed = Listed(pages, np.zeros(len(pages), np.int64), ranks, [self._node.name])
        exchange.reply(FrameKind.FOUND, pack_found(listed))
