"""``python bench/run.py [NAME...] [--json]``: the same as ``kvstore bench``, which lives in ``kvstore/bench/``."""

import sys

from kvstore.cli.main import main

main(["bench", *sys.argv[1:]])
