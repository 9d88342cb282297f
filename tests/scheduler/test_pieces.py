"""A text that grows is cut as it would be at once, however it grows."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scheduler.pieces import Chain, Piece, chain, checkpoint_key, root_of

ROOT = root_of("model", "owner", "salt")


@given(
    tokens=st.lists(st.integers(0, 2**31), max_size=40),
    block=st.integers(1, 9),
    steps=st.lists(st.integers(0, 40), max_size=6),
)
def test_the_blocks_of_a_text_are_the_same_in_any_steps(tokens: list[int], block: int, steps: list[int]) -> None:
    text = Chain(ROOT, block)
    pieces: list[Piece] = []
    for length in sorted(step for step in steps if step <= len(tokens)):
        pieces += text.grow(tokens, length)
    pieces += text.grow(tokens, len(tokens))
    assert [piece.key for piece in pieces] == text.keys == list(chain(ROOT, tokens, block))
    assert [(piece.start, piece.end) for piece in pieces] == list(pairwise(range(0, len(tokens) + 1, block)))
    assert [piece.parent for piece in pieces] == [ROOT, *text.keys][: len(pieces)]
    pause = text.checkpoint(tokens, len(tokens))
    assert pause.key == checkpoint_key([ROOT, *text.keys][-1], tokens[text.end :]) not in text.keys
    assert (pause.start, pause.end, pause.checkpoint) == (text.end, len(tokens), True)
