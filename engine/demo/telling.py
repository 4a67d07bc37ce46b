"""How the demo tells what it does: the lines of requests as they are answered, and the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from engine.demo.rows import DemoRow
from engine.demo.script import Conversation
from kvstore.cli.output import bytes_text, duration_text, ratio_text, table_text

ANSWER_CHARACTERS: Final = 12
QUESTION_CHARACTERS: Final = 48
GIBBERISH: Final = (
    "Its weights are random: what it says is gibberish, a token per byte. `--model PATH` takes a real one."
)
KILLED: Final = "-- kill -9 of the node: what it held can still be read; nothing can be written until it is back"
RESTARTING: Final = """
The machine restarts: engines and node are stopped, shared memory is emptied. The node starts on the same NVMe file,
and two conversations go on, two turns each. From now on engines keep pages in their arenas (HBM), too:
"""
HEADERS: Final = (
    "request", "node", "prompt", "HBM", "DRAM", "NVMe", "computed", "by", "TTFT", "without", "times", "loaded", "moved",
    "answer",
)  # fmt: skip
MEANING: Final = """\
  prompt           its tokens; of these HBM, DRAM and NVMe: reused from there, HBM being what the engine itself kept;
                   computed by the prefill or decode engine
  TTFT, without    time to the first token with the pool, and of the same prompt once more without it
  loaded, moved    bytes of KV read from the pool, and brought from the prefill engine, with the pool
  answer           same: both answers are the same tokens"""
TIERS: Final = {"dram": "DRAM", "nvme": "NVMe"}
NODE: Final = {"up": "up", "down": "killed", "again": "back", "restarted": "restarted"}


class Streamed:
    """A line that grows: what is asked, the answer while it comes, cut where it gets long, and what it took."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._characters = 0

    def begin(self, text: str) -> None:
        """A new line."""
        self._characters = 0
        self._say(text, nl=False)

    def more(self, text: str) -> None:
        """More of the answer. What a terminal would take for a command, or cannot show, is a dot."""
        shown = "".join(
            letter if letter.isprintable() and letter != "\N{REPLACEMENT CHARACTER}" else "." for letter in text
        )
        shown = shown[: ANSWER_CHARACTERS - self._characters]
        self._characters += len(shown)
        if shown:
            self._say(shown, nl=False)

    def end(self, text: str) -> None:
        """The end of the line."""
        self._say(f"{' ' * (ANSWER_CHARACTERS - self._characters)}  {text}")


def asked(number: int, conversation: Conversation) -> str:
    """Who asks what."""
    who = f"{conversation.user}.{conversation.turns}"
    question = conversation.question[:QUESTION_CHARACTERS]
    return f"{number:>3}  {who:<10} {conversation.document:<21} {question:<{QUESTION_CHARACTERS}} > "


def summary(row: DemoRow) -> str:
    """What the request took, in a few words."""
    return f"{duration_text(row.ttft_ms / 1e3)}" + ("" if row.same else "  WRONG: not the answer without the pool")


def started_again(line: str, took_s: float) -> str:
    """The node is back."""
    return f"-- {took_s:.2f} s after it is started again: {line}"


def table(rows: Sequence[DemoRow]) -> str:
    """A line per request."""
    cells = [
        (
            row.number,
            NODE[row.phase],
            row.prompt_tokens,
            row.hbm_tokens,
            row.dram_tokens,
            row.nvme_tokens,
            row.computed_tokens,
            row.computed_by,
            _ms(row.ttft_ms),
            _ms(row.ttft_without_ms),
            f"{row.ttft_without_ms / row.ttft_ms:.1f}" if row.ttft_ms else "-",
            bytes_text(row.loaded_bytes),
            bytes_text(row.moved_bytes),
            "same" if row.same else "WRONG",
        )
        for row in rows
    ]
    return f"\n{table_text(HEADERS, cells)}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms"


def tiers(found: dict[str, Any]) -> str:
    """What the node's tiers hold."""
    cells = [
        (
            TIERS[name],
            about["pages"],
            bytes_text(about["used_bytes"]),
            bytes_text(about["capacity_bytes"]),
        )
        for name, about in ((name, found[name]) for name in TIERS)
    ]
    return f"\n{table_text(('tier', 'pages', 'used', 'of'), cells)}"


def totals(rows: Sequence[DemoRow]) -> dict[str, Any]:
    """Sums over requests."""
    prompt = sum(row.prompt_tokens for row in rows)
    tiers = {f"{tier}_tokens": sum(getattr(row, f"{tier}_tokens") for row in rows) for tier in ("hbm", "dram", "nvme")}
    return {
        "prompt_tokens": prompt,
        **tiers,
        "reused_ratio": sum(tiers.values()) / prompt if prompt else 0.0,
        "ttft_s": sum(row.ttft_ms for row in rows) / 1e3,
        "ttft_without_s": sum(row.ttft_without_ms for row in rows) / 1e3,
    }


def ending(found: dict[str, Any], wrong: Sequence[int]) -> str:
    """The sums, and whether all is well."""
    hbm, dram, nvme, prompt = (found[f"{name}_tokens"] for name in ("hbm", "dram", "nvme", "prompt"))
    reused = hbm + dram + nvme
    answers = (
        f"WRONG answers: requests {', '.join(map(str, wrong))}" if wrong else "every answer is the same without it"
    )
    return (
        f"\nreused {reused} of {prompt} prompt tokens ({ratio_text(reused, prompt)}): {hbm} from HBM, "
        f"{dram} from DRAM, {nvme} from NVMe\n"
        f"time to first tokens, all together: {duration_text(found['ttft_s'])} with the pool, "
        f"{duration_text(found['ttft_without_s'])} without; {answers}"
    )
