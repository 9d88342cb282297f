"""Logprobs in OpenAI's two forms: tokens as text and bytes, no infinities, offsets into the text."""

import json
import math

from api.openai.logprobs import chat_logprobs, completion_logprobs
from api.text import ByteTokenizer
from api.transcript import LoggedToken
from scheduler.events import TokenLogprob

BYTES = ByteTokenizer().token_bytes


def logged(token: int, logprob: float, *top: tuple[int, float], offset: int = 0) -> LoggedToken:
    return LoggedToken(token, TokenLogprob(logprob, top), offset)


def test_a_chats_tokens_have_their_text_their_bytes_and_their_rivals() -> None:
    assert chat_logprobs([logged(97, -0.5, (97, -0.5), (0xC3, -2.0))], BYTES) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -2.0, "bytes": [0xC3]},
                ],
            }
        ],
        "refusal": None,
    }


def test_a_texts_tokens_stand_in_parallel_lists() -> None:
    told = completion_logprobs([logged(97, -3.0, (98, -0.5)), logged(98, -0.1, (98, -0.1), offset=1)], BYTES, 10)
    assert told == {
        "tokens": ["a", "b"],
        "token_logprobs": [-3.0, -0.1],
        "top_logprobs": [{"b": -0.5, "a": -3.0}, {"b": -0.1}],
        "text_offset": [10, 11],
    }


def test_of_halves_that_read_alike_the_drawn_one_is_told_else_the_likeliest() -> None:
    told = completion_logprobs([logged(97, -1.0, (0xC3, -2.0), (0xC4, -3.0))], BYTES, 0)
    assert told is not None
    assert told["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -2.0, "a": -1.0}]
    drawn = completion_logprobs([logged(0xC4, -3.0, (0xC3, -2.0), (0xC4, -3.0))], BYTES, 0)
    assert drawn is not None
    assert drawn["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -3.0}]


def test_what_json_cannot_carry_is_a_very_small_number() -> None:
    for unspeakable in (-math.inf, math.nan, -1e9):
        tokens = [logged(97, unspeakable, (98, unspeakable))]
        for told in (chat_logprobs(tokens, BYTES), completion_logprobs(tokens, BYTES, 0)):
            assert json.dumps(told, allow_nan=False).count("-9999.0") >= 2


def test_no_tokens_no_logprobs() -> None:
    assert chat_logprobs([], BYTES) is None
    assert completion_logprobs([], BYTES, 0) is None
