"""Text of an answer as it grows: whole characters, stop strings across tokens, bytes and Hugging Face tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.text.tokenizer import WINDOW_TOKENS_MAX, ByteTokenizer, Detokenizer, HFTokenizer

BYTES = ByteTokenizer()
CORPUS = [
    "The store keeps pages of keys and values, so that a prompt is computed once. " * 3,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 速い茶色の狐 🦊🦊 naïve café",
]


def byte_level() -> HFTokenizer:
    """As of GPT-2, Llama 3 and Qwen: a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>"))


def sentence_piece() -> HFTokenizer:
    """As of Llama 2 and Mistral: a first space is stripped, other bytes are tokens of their own."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdehkmnoprstuvy.", "▁t", "he", "▁the", "▁k", "▁ke", "▁key"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "k"), ("▁k", "e"), ("▁ke", "y")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"))


TOKENIZERS = {"bytes": BYTES, "byte-level": byte_level(), "sentencepiece": sentence_piece()}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
texts = st.text(st.one_of(st.sampled_from("the keys abé速🦊\n"), st.characters(exclude_categories=["Cs"])), max_size=40)


def run(tokenizer, ids, stop=()) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = [detokenizer.feed(token) for token in ids]
    pieces.append(detokenizer.flush())
    return pieces, detokenizer.stopped


def first_stop(text: str, stop) -> tuple[str, str | None]:
    """The plain way: look at every beginning of the text."""
    for end in range(1, len(text) + 1):
        met = [word for word in stop if text[:end].endswith(word)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


# --- Tokenizers ------------------------------------------------------------------------------------------------------


@every_tokenizer
def test_a_tokenizer_says_its_size_and_its_end(tokenizer):
    (eos,) = tokenizer.eos_ids
    assert 0 <= eos < tokenizer.vocab_size
    ids = tokenizer.encode(CORPUS[1])
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode([*ids, eos]) == CORPUS[1]


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_a_tokenizer_without_a_fast_one_below_decodes_alike(name):
    fast = TOKENIZERS[name]

    class Slow:
        eos_token_id = 0
        decode = staticmethod(fast._tokenizer.decode)
        __len__ = fast._tokenizer.__len__

    ids = fast.encode(CORPUS[1])
    assert HFTokenizer(Slow()).decode([*ids, *fast.eos_ids]) == fast.decode(ids) == CORPUS[1]


# --- Streams ---------------------------------------------------------------------------------------------------------


@every_tokenizer
def test_an_answer_is_what_decoding_it_whole_gives_and_no_piece_is_half_a_character(tokenizer):
    @given(texts)
    @settings(max_examples=60, deadline=None)
    def streamed(text):
        ids = tokenizer.encode(text)
        pieces, stopped = run(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert stopped is None
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)

    streamed()


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_tokens_at_random_give_the_same_as_decoding_them_whole(name):
    """A model may make any bytes at all; the window of tokens is left many times over."""
    tokenizer = TOKENIZERS[name]

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4 * WINDOW_TOKENS_MAX))
    @settings(max_examples=100, deadline=None)
    def streamed(ids):
        assert "".join(run(tokenizer, ids)[0]) == tokenizer.decode(ids)

    streamed()


def test_a_long_answer_decodes_a_few_tokens_at_a_time():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode(CORPUS[0] * 20)
    sizes = []
    decode = tokenizer.decode

    class Counting(HFTokenizer):
        def decode(self, ids):
            sizes.append(len(ids))
            return decode(ids)

    counting = Counting(tokenizer._tokenizer)
    assert "".join(run(counting, ids)[0]) == CORPUS[0] * 20
    assert max(sizes) <= WINDOW_TOKENS_MAX + 1


# --- Stop strings ----------------------------------------------------------------------------------------------------


@every_tokenizer
def test_a_stop_string_ends_the_text_wherever_tokens_end(tokenizer):
    ids = tokenizer.encode("the keys and the pages")
    whole = tokenizer.decode(ids)
    for word in ("keys", "ys and t", "t", " ", "pages", "s"):
        pieces, stopped = run(tokenizer, ids, (word,))
        assert stopped == word and "".join(pieces) == whole[: whole.index(word)]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.data())
def test_stopping_is_what_looking_at_every_beginning_gives_however_the_text_arrives(text, stop, data):
    wanted, met = first_stop(text, stop)
    pieces, stopped = run(BYTES, BYTES.encode(text), stop)
    assert ("".join(pieces), stopped) == (wanted, met)
    given_so_far = ""
    for end, piece in enumerate(pieces[:-1], 1):
        given_so_far += piece
        rest = text[len(given_so_far) : end]
        if stopped is None and stop:
            assert not rest or any(word.startswith(rest) for word in stop), "held back for a reason only"


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_pieces_of_more_characters_stop_alike(name):
    tokenizer = TOKENIZERS[name]

    @given(texts, st.lists(st.text("the kys🦊", min_size=1, max_size=4), max_size=3))
    @settings(max_examples=60, deadline=None)
    def streamed(text, stop):
        pieces, stopped = run(tokenizer, tokenizer.encode(text), stop)
        assert ("".join(pieces), stopped) == first_stop(text, stop)

    streamed()
