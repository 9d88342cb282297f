"""Detokenizers: whole characters only, and the joined pieces are the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.detokenize import REPLACEMENT, ByteDetokenizer, Detokenizer, StreamDetokenizer
from tests.api.tokenizers_at_hand import byte_fallback, byte_level

LEVEL = byte_level()
FALLBACK = byte_fallback()


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*map(detokenizer.push, tokens), detokenizer.close()]


def single_bytes(data: bytes) -> list[int]:
    """Tokens of the byte-level tokenizer, one per byte."""
    return [LEVEL.encode(chr(byte), add_special_tokens=False).ids[0] if byte < 128 else _high(byte) for byte in data]


def _high(byte: int) -> int:
    """A byte above 127 as one token: the byte-level alphabet is latin-1 but for the gaps."""
    gaps = [code for code in range(256) if not (33 <= code <= 126 or 161 <= code <= 172 or 174 <= code <= 255)]
    symbol = chr(256 + gaps.index(byte)) if byte in gaps else chr(byte)
    token = LEVEL.token_to_id(symbol)
    assert token is not None
    return int(token)


@given(st.binary(max_size=60))
def test_bytes_joined_are_the_text_of_the_whole(data: bytes) -> None:
    assert "".join(pieces(ByteDetokenizer(), list(data))) == data.decode(errors="replace")


def test_tokens_that_are_no_bytes_have_no_text() -> None:
    assert pieces(ByteDetokenizer(), [104, 256, 105]) == ["h", "", "i", ""]


@given(st.text(max_size=40))
def test_a_character_is_given_out_once_it_is_whole(text: str) -> None:
    detokenizer = ByteDetokenizer()
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push(byte)
        assert text.startswith(shown)
    assert shown == text


@given(st.text(max_size=60))
def test_text_survives_a_byte_level_tokenizer(text: str) -> None:
    tokens = LEVEL.encode(text, add_special_tokens=False).ids
    shown = ""
    detokenizer = StreamDetokenizer(LEVEL)
    for token in tokens:
        shown += detokenizer.push(token)
        assert LEVEL.decode(tokens).startswith(shown)
    assert shown + detokenizer.close() == LEVEL.decode(tokens)


@given(st.lists(st.integers(0, LEVEL.get_vocab_size() - 1), max_size=120))
def test_any_byte_level_tokens_joined_are_what_decoding_all_gives(tokens: list[int]) -> None:
    assert "".join(pieces(StreamDetokenizer(LEVEL), tokens)) == LEVEL.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.integers(0, 255), min_size=40, max_size=200), st.text(min_size=1, max_size=5))
def test_long_rubbish_is_not_held_forever_and_cuts_no_character(rubbish: list[int], text: str) -> None:
    data = bytes(byte | 0x80 for byte in rubbish) + text.encode()
    tokens = single_bytes(data)
    assert "".join(pieces(StreamDetokenizer(LEVEL), tokens)) == data.decode(errors="replace")


@pytest.mark.parametrize("rubbish", range(20, 44))
def test_a_character_at_the_end_of_long_rubbish_is_not_cut(rubbish: int) -> None:
    data = b"\xff" * rubbish + "🦄漢é".encode()
    assert "".join(pieces(StreamDetokenizer(LEVEL), single_bytes(data))) == data.decode(errors="replace")


def test_rubbish_is_given_out_after_a_while() -> None:
    detokenizer = StreamDetokenizer(LEVEL)
    assert any(detokenizer.push(_high(0xFF)) for _ in range(64))


@given(st.lists(st.sampled_from(["hello", "world", "漢", "x", "é", "🦄", "end", "many ends"]), max_size=20))
def test_words_keep_their_spaces_under_byte_fallback(words: list[str]) -> None:
    ids = {"hello": [256], "world": [257], "x": [258], "漢": [260], "end": [261], "many ends": [261] * 40}
    tokens = [token for word in words for token in ids.get(word, list(word.encode()))]
    assert "".join(pieces(StreamDetokenizer(FALLBACK), tokens)) == FALLBACK.decode(tokens)


@given(st.lists(st.integers(0, 261), max_size=120))
def test_no_tokens_at_all_stop_a_detokenizer(tokens: list[int]) -> None:
    text = "".join(pieces(StreamDetokenizer(FALLBACK), tokens))
    assert len(text) >= sum(token == 258 for token in tokens)


def test_it_goes_on_where_decode_stream_fails() -> None:
    """漢 in bytes, then a stray byte: the decoder takes 漢 back, which is given out already ("Invalid prefix")."""
    tokens = [256, *"漢".encode(), 0xE6, 258, 257, 257]
    assert pieces(StreamDetokenizer(FALLBACK), tokens) == [
        "hello",
        "",
        "",
        "漢",
        "",
        f"{REPLACEMENT}x",
        " world",
        " world",
        "",
    ]


def test_a_character_only_begun_is_shown_at_the_end() -> None:
    assert pieces(StreamDetokenizer(LEVEL), single_bytes("é".encode()[:1])) == ["", REPLACEMENT]


@pytest.mark.parametrize("count", [1, 100])
def test_special_tokens_have_no_text(count: int) -> None:
    (end,) = LEVEL.encode("<|im_end|>", add_special_tokens=False).ids
    tokens = [*LEVEL.encode("hello", add_special_tokens=False).ids, *[end] * count]
    tokens += LEVEL.encode(" world", add_special_tokens=False).ids
    assert "".join(pieces(StreamDetokenizer(LEVEL), tokens)) == "hello world"
