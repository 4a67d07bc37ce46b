"""The generated code that is committed is what proto/ gives, by the version of the generator that is pinned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "proto" / "kvstore" / "v1"
STUBS = ROOT / "kvstore" / "pb"


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    """Where this fails: ``make proto``, and commit kvstore/pb."""
    protos = sorted(path.name for path in PROTO.glob("*.proto"))
    kinds = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Ikvstore/pb={PROTO}", *kinds]
    command += [f"kvstore/pb/{name}" for name in protos]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in (tmp_path / "kvstore" / "pb").iterdir()}
    committed = {path.name: path.read_text() for path in STUBS.glob("*_pb2*.py*")}
    assert made and committed == made
