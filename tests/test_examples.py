"""The programs of ``examples/`` run, and leave nothing behind; the two commands for vLLM are valid."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.main import cli

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 240.0

# What each program prints when it works.
OUTPUT = {
    "two_processes": "reader: 15 pages, 960 tokens, from ['DRAM']",
    "layerwise": "prefill: 4 pages sealed",
    "objects": "deleted: 2 of 3",
    "conductor": "192 of 200 prompt tokens found",
}


def test_every_example_is_tested_and_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(OUTPUT)
    listed = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh") and path.name not in listed] == []


@pytest.mark.parametrize("name", OUTPUT)
def test_an_example_runs_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    own = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
    env = {**own, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "output", "w+") as output:
        command = [sys.executable, str(EXAMPLES / f"{name}.py")]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            left = list(Path("/dev/shm").glob(f"kvstore-*-{process.pid}*"))
            for folder in left:
                shutil.rmtree(folder)
        output.seek(0)
        said = output.read()
    assert code == 0 and OUTPUT[name] in said, said
    assert left == []


def test_the_two_commands_for_vllm_are_valid() -> None:
    script = EXAMPLES / "vllm.sh"
    subprocess.run(["bash", "-n", script], check=True, timeout=TIMEOUT_S)
    assert os.access(script, os.X_OK)
    node, vllm = re.findall(r"^(?:kvstore|vllm) serve .*?(?=\n\n|\n*\Z)", script.read_text(), re.DOTALL | re.MULTILINE)

    flags = shlex.split(node.removesuffix("&"))[2:]
    with cli.make_context("kvstore", ["serve"]) as context:
        serve = cli.get_command(context, "serve")
        assert serve is not None
        with serve.make_context("serve", flags, parent=context) as parsed:
            assert parsed.params["name"] == "pool"

    words = shlex.split(vllm)
    settings = json.loads(words[words.index("--kv-transfer-config") + 1])
    extra = settings["kv_connector_extra_config"]
    assert extra["node"] == parsed.params["name"]  # vLLM finds the node of the first command
    module = settings["kv_connector_module_path"].replace(".", "/")
    connector = ast.parse((ROOT / module / "connector.py").read_text())
    assert settings["kv_connector"] in {node.name for node in connector.body if isinstance(node, ast.ClassDef)}
    known = next(
        ast.literal_eval(node.value)
        for node in connector.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS"
    )
    assert set(extra) <= set(known)
    assert settings["kv_load_failure_policy"] == "recompute"  # the connector refuses to load with another one
    assert settings["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
