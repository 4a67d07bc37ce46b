"""``python bench/run.py [NAME...] [--json]``: the same as ``kvstore bench``, which is in ``kvstore/bench/``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of a checkout that is not installed

from kvstore.cli.main import main

main(["bench", *sys.argv[1:]])
