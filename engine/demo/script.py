"""What is asked in the demo, and by whom: conversations about documents.

Their shape is that of a trace (who comes back, how much text each turn adds, how long answers are), with lengths scaled
down to what a CPU computes in a second. Their text is real. Conversations outnumber documents, so that several users
ask about the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.simulator.trace import BLOCK_TOKENS, TraceRequest
from engine.text.tokenizer import ByteTokenizer
from kvstore.errors import InvalidRequest

Encode = Callable[[str, bool], list[int]]
"""Tokens of a text; True: the text opens a prompt, and what the tokenizer puts before those goes with it."""

OPENING_TOKENS_MEAN = 450  # what the mean opening of the trace becomes
OPENING_TOKENS_MIN, OPENING_TOKENS_MAX = 300, 800
PASTED_TOKENS_MAX = 200
ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX = 6, 12
PROMPT_TOKENS_MAX = 4096  # a conversation that would get longer is opened anew
DOCUMENTS = 4
# Which of them the conversations are about, in turn: some documents are asked about more often than others.
POPULARITY = (0, 1, 0, 2, 1, 0, 3, 2, 0, 1)
SYSTEM = "You answer questions about kvstore from its documents. Be brief.\n\n"
QUESTIONS = (
    "What is this about?",
    "What happens when DRAM is full?",
    "Which of this survives a restart of the machine?",
    "How do I see what is going on?",
    "What does it cost?",
    "Who is allowed to do that?",
    "What is done when a process dies in the middle?",
    "Give me an example.",
    "Which settings matter most?",
    "And what does it not do?",
    "How is that checked?",
)


@dataclass(frozen=True)
class ScriptTurn:
    """One request: turn ``number``, from 1 on, of a conversation. ``text_tokens`` of the opening, or those added."""

    conversation: int
    number: int
    text_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Document:
    """A text that is asked about."""

    name: str
    text: str


@dataclass
class Conversation:
    """A user's questions about one document, and the answers so far. ``tokens``: all of it, the next prompt's start."""

    user: str
    document: str
    pasted: int  # tokens of the document that are in the prompts
    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    question: str = ""


def turns(requests: Iterable[TraceRequest]) -> list[ScriptTurn]:
    """Conversations of a trace, scaled down.

    A request is the next turn of the one that last used its deepest known block, where it repeats all of that one's
    full blocks and more than the first block, which all may share. ``trace.statistics`` counts them in the same way.
    """
    found: list[ScriptTurn] = []
    history: list[TraceRequest] = []
    last_use: dict[int, int] = {}
    extended: set[int] = set()
    conversations = 0
    for index, request in enumerate(requests):
        known = 0
        while known < len(request.block_ids) and request.block_ids[known] in last_use:
            known += 1
        before = last_use[request.block_ids[known - 1]] if known >= 2 else -1
        answer_tokens = request.output_tokens
        if before >= 0 and before not in extended and known >= history[before].input_tokens // BLOCK_TOKENS:
            extended.add(before)
            added = request.input_tokens - history[before].input_tokens - history[before].output_tokens
            found.append(ScriptTurn(found[before].conversation, found[before].number + 1, max(0, added), answer_tokens))
        else:
            found.append(ScriptTurn(conversations, 1, request.input_tokens, answer_tokens))
            conversations += 1
        history.append(request)
        last_use |= dict.fromkeys(request.block_ids, index)
    openings = [turn.text_tokens for turn in found if turn.number == 1]
    scale = OPENING_TOKENS_MEAN * len(openings) / max(1, sum(openings))
    return [_scaled(turn, scale) for turn in found]


def _scaled(turn: ScriptTurn, scale: float) -> ScriptTurn:
    text_tokens = int(turn.text_tokens * scale)
    if turn.number == 1:
        text_tokens = min(max(text_tokens, OPENING_TOKENS_MIN), OPENING_TOKENS_MAX)
    answer_tokens = min(max(int(turn.answer_tokens * scale), ANSWER_TOKENS_MIN), ANSWER_TOKENS_MAX)
    return ScriptTurn(turn.conversation, turn.number, min(text_tokens, OPENING_TOKENS_MAX), answer_tokens)


class Script:
    """Makes the prompts. ``prompt``, then ``answered``, turn by turn; conversations may alternate."""

    def __init__(self, documents: Sequence[Document], encode: Encode) -> None:
        assert documents
        self._encode = encode
        self.documents = list(documents)
        self._tokens = {document.name: encode(document.text, False) for document in documents}
        self._excerpt_tokens: dict[str, int] = {}  # of each document, by its first conversation
        self.conversations: dict[int, Conversation] = {}

    def prompt(self, turn: ScriptTurn) -> Conversation:
        """The conversation with the turn's prompt in ``tokens``."""
        found = self.conversations.get(turn.conversation)
        if found is None or len(found.tokens) + turn.text_tokens > PROMPT_TOKENS_MAX:
            found = self.conversations[turn.conversation] = self._opened(turn)
        else:
            found.tokens += self._more(found, turn)
        found.turns += 1
        found.question = QUESTIONS[(5 * turn.conversation + found.turns) % len(QUESTIONS)]
        found.tokens += self._encode(f"\n\nUser: {found.question}\nAssistant:", False)
        return found

    def answered(self, turn: ScriptTurn, tokens: Sequence[int]) -> None:
        """What the turn's answer was."""
        self.conversations[turn.conversation].tokens += tokens

    def some(self, tokens: int) -> list[int]:
        """A prompt of about so many tokens, in no conversation."""
        return self._tokens[self.documents[-1].name][-tokens:]

    def _opened(self, turn: ScriptTurn) -> Conversation:
        document = self.documents[POPULARITY[turn.conversation % len(POPULARITY)] % len(self.documents)]
        name = document.name
        head = self._encode(f"{SYSTEM}# {name}\n\n", True)
        wanted = self._excerpt_tokens.setdefault(name, max(1, turn.text_tokens - len(head)))
        excerpt = self._tokens[name][:wanted]
        return Conversation(f"user {turn.conversation + 1}", name, len(excerpt), head + excerpt)

    def _more(self, conversation: Conversation, turn: ScriptTurn) -> list[int]:
        """Where a turn of the trace brings much text, its user pastes more of the document."""
        start = conversation.pasted
        pasted = self._tokens[conversation.document][start : start + min(turn.text_tokens, PASTED_TOKENS_MAX)]
        conversation.pasted += len(pasted)
        return self._encode("\n\n", False) + pasted if pasted else []


def read_documents(folder: Path | None) -> list[Document]:
    """Texts of a folder, or of this project: its documents, largest first.

    Raises:
        InvalidRequest: "documents": there are none.
    """
    root = Path(__file__).resolve().parents[2]
    files = sorted(folder.glob("*.md")) if folder is not None else [root / "README.md", *root.glob("docs/*.md")]
    base = folder if folder is not None else root
    found = [
        Document(str(file.relative_to(base)), file.read_text(encoding="utf-8", errors="replace"))
        for file in files
        if file.is_file() and file.stat().st_size
    ]
    if not found:
        raise InvalidRequest("documents", f"{base} has no documents (*.md); name a folder that has some")
    return sorted(found, key=lambda document: (-len(document.text), document.name))[:DOCUMENTS]


def encoder(model: str | None) -> Encode:
    """The tokenizer of the model in a folder; None: bytes, as presets have it."""
    if model is None:
        tokenizer = ByteTokenizer()
        return lambda text, _: tokenizer.encode(text)
    from transformers import AutoTokenizer  # only here: presets need none of it

    loaded = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    # A whole document is longer than the model's context, and needs no warning: a prompt is a part of it.
    return lambda text, first: [int(token) for token in loaded.encode(text, add_special_tokens=first, verbose=False)]
