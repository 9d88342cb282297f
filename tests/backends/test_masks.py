"""Mask words and booleans say the same of every token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.masks import unpack

WORD = st.integers(-(2**31), 2**31 - 1)


@given(
    words=st.integers(1, 4).flatmap(lambda count: st.lists(st.lists(WORD, min_size=count, max_size=count), min_size=1)),
    vocabulary=st.integers(1, 150),
)
def test_bit_t_mod_32_of_word_t_div_32_is_token_t(words: list[list[int]], vocabulary: int) -> None:
    expected = [
        [token < 32 * len(row) and row[token // 32] >> token % 32 & 1 == 1 for token in range(vocabulary)]
        for row in words
    ]
    allowed = unpack(np.array(words, dtype=np.int32), vocabulary)
    assert allowed.dtype == np.bool_
    assert allowed.tolist() == expected


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 64, 65])
def test_what_lies_beyond_the_words_is_not_allowed(vocabulary: int) -> None:
    allowed = unpack(np.full((1, 1), -1, dtype=np.int32), vocabulary)
    assert allowed.tolist() == [[token < 32 for token in range(vocabulary)]]


def test_words_may_be_a_part_of_a_larger_array() -> None:
    words = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert np.array_equal(unpack(words[:, ::2], 64), unpack(words[:, ::2].copy(), 64))
