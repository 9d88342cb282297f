"""Single tokens as bytes: joined they are the bytes of the text, whatever tokenizer spells them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from api.vocabulary import TokenBytes
from tests.api.tokenizers_at_hand import byte_fallback, byte_level

LEVEL = byte_level()
FALLBACK = byte_fallback()
LEVEL_BYTES = TokenBytes(LEVEL)
FALLBACK_BYTES = TokenBytes(FALLBACK)


@given(st.text(max_size=40))
def test_byte_level_tokens_joined_are_the_text(text: str) -> None:
    tokens = LEVEL.encode(text, add_special_tokens=False).ids
    assert b"".join(map(LEVEL_BYTES, tokens)) == text.encode()


@given(st.lists(st.integers(2, LEVEL.get_vocab_size() - 1), max_size=40))
def test_any_byte_level_tokens_joined_decode_to_what_the_tokenizer_says(tokens: list[int]) -> None:
    assert b"".join(map(LEVEL_BYTES, tokens)).decode(errors="replace") == LEVEL.decode(tokens)


@given(st.lists(st.integers(0, 260), min_size=1, max_size=20))
def test_byte_fallback_tokens_joined_are_the_text_but_for_its_first_space(tokens: list[int]) -> None:
    joined = b"".join(map(FALLBACK_BYTES, tokens))
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        return  # the tokenizer shows rubbish in its own way
    decoded = FALLBACK.decode(tokens)
    assert decoded in (text, text.removeprefix(" "))


def test_every_byte_of_byte_fallback_is_one_token() -> None:
    assert [FALLBACK_BYTES(byte) for byte in range(256)] == [bytes((byte,)) for byte in range(256)]


def test_a_special_token_has_its_name_and_an_unknown_one_nothing() -> None:
    (end,) = LEVEL.encode("<|im_end|>", add_special_tokens=False).ids
    assert LEVEL_BYTES(end) == b"<|im_end|>"
    assert FALLBACK_BYTES(261) == b"</s>"
    assert LEVEL_BYTES(10**6) == FALLBACK_BYTES(10**6) == b""


@pytest.mark.parametrize(
    ("decoder", "word", "spelled"),
    [
        (None, "plain", b"plain"),
        (decoders.WordPiece(), "##ing", b"##ing"),
        (decoders.Metaspace(), "\N{LOWER ONE EIGHTH BLOCK}hello", b" hello"),
    ],
)
def test_other_decoders_are_asked(decoder: decoders.Decoder | None, word: str, spelled: bytes) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: 0}, unk_token=word))
    if decoder is not None:
        tokenizer.decoder = decoder
    assert TokenBytes(tokenizer)(0) == spelled
