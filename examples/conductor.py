"""A node, an engine and a conductor that offers OpenAI's API, with a tiny model of random weights, on a CPU.

    .venv/bin/python examples/conductor.py

The three daemons find each other through a catalog in a file. The program sends the same prompt twice. The second
answer is the same, but the engine finds most of the prompt in the node instead of computing it. `kvstore demo` shows
more, with a trained model.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

MODEL = "tiny-llama"  # a preset; the folder of a Hugging Face model (config, safetensors, tokenizer) works too
KVSTORE = (sys.executable, "-c", "from kvstore.cli.main import main; main()")  # the command `kvstore`
START_S = 120.0
EXIT_S = 30.0


@contextlib.contextmanager
def daemon(*arguments: str) -> Iterator[str]:
    """Run `kvstore ARGUMENTS` in the background. Yields the line that the daemon prints when it is ready."""
    print("$ kvstore", *arguments)
    process = subprocess.Popen([*KVSTORE, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline().strip() if readable else ""  # empty, too, if the process has ended
        if not line:
            raise SystemExit(f"kvstore {arguments[0]}: is not ready (exit code {process.poll()})")
        print(line)
        yield line
    finally:
        process.send_signal(signal.SIGTERM)  # the daemon finishes running requests, then exits
        try:
            process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(address: str, tokens: list[int]) -> dict:
    """Request one completion. The prompt is a list of token ids; it could also be text."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            # Shortly after its start a conductor may not have found the engine yet.
            if error.code not in (404, 503) or time.monotonic() > deadline:
                raise SystemExit(f"completions: status {error.code} ({error.read().decode()})") from error
            time.sleep(0.1)


def main() -> None:
    """Run the example in a folder of its own."""
    # A node's memory outlives its daemon, so this node gets a folder that is removed when the example ends.
    with tempfile.TemporaryDirectory(prefix=f"kvstore-example-{os.getpid()}-", dir="/dev/shm") as folder:
        os.environ["KVSTORE_SHM_DIR"] = folder  # where clients look for nodes
        with contextlib.ExitStack() as daemons:
            converse(folder, daemons)


def converse(folder: str, daemons: contextlib.ExitStack) -> None:
    """Start the three daemons one after the other, and send the prompt twice."""
    catalog = f"file:{folder}/catalog"
    node = ("--name", "n0", "--dram", "64MiB", "--shm-dir", folder)
    daemons.enter_context(daemon("serve", *node, "--listen", "127.0.0.1:0", "--catalog", catalog))
    engine = ("--model", MODEL, "--node", "n0", "--arena", "16MiB", "--page-tokens", "16", "--threads", "1")
    daemons.enter_context(daemon("engine", *engine, "--listen", "127.0.0.1:0", "--catalog", catalog))
    http = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    ready = daemons.enter_context(daemon("conductor", "--catalog", catalog, *http))
    address = ready.split("http on ")[1].split()[0].rstrip(",")

    prompt = [random.Random(0).randrange(256) for _ in range(200)]
    first, second = ask(address, prompt), ask(address, prompt)
    for answer in (first, second):
        usage = answer["usage"]
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"{cached_tokens} of {usage['prompt_tokens']} prompt tokens found")
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192  # 12 pages of 16 tokens


if __name__ == "__main__":
    main()
