"""``prefix_cache`` and models that PEFT has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hosts import PEFT, PEFT_ENV

pytestmark = pytest.mark.skipif(not PEFT.exists(), reason="PEFT is not there: make hosts")


def test_adapters_of_peft_are_refused_and_merged_ones_have_pages_of_their_own() -> None:
    worker = Path(__file__).parents[1] / "helpers" / "workers" / "peft_models.py"
    command, environment = [sys.executable, str(worker)], {**os.environ, **PEFT_ENV}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reasons = json.loads(done.stdout.splitlines()[-1])
    served = {what for what, reason in reasons.items() if not reason}
    assert served == {"merged and unloaded", "moved"}
    for what in set(reasons) - served:
        assert "switchable adapters" in reasons[what] or "unknown" in reasons[what], (what, reasons[what])
