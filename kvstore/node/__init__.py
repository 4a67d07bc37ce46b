"""The node: stores, moves and serves the pages of one machine, as ``state`` decides."""
