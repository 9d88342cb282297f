"""Stop strings: found wherever the text is cut, never shown, and released when only begun."""

from hypothesis import given
from hypothesis import strategies as st

from api.stop import StopMatcher

TEXT = st.text(alphabet="ab.", max_size=40)
STOPS = st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), min_size=1, max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    """A text in pieces, some of them empty."""
    text = draw(TEXT)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool, int]:
    """What is shown, whether a stop was found, and the number of the piece that completed it."""
    matcher = StopMatcher(stops)
    shown, completed = "", 0
    for number, piece in enumerate(pieces, start=1):
        shown += matcher.push(piece)
        if matcher.found and not completed:
            completed = number
    return shown + matcher.close(), matcher.found, completed


@given(st.text(alphabet="ab.", min_size=1, max_size=5), cut_texts())
def test_one_stop_string_is_found_where_str_find_finds_it(stop: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    at = text.find(stop)
    shown, found, _ = run([stop], pieces)
    assert (shown, found) == ((text[:at], True) if at >= 0 else (text, False))


@given(STOPS, cut_texts())
def test_of_several_the_one_that_ends_first_wins_then_the_longest(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text[: sum(min(ends))] if ends else text
    assert run(stops, pieces)[:2] == (expected, bool(ends))


@given(STOPS, cut_texts())
def test_the_piece_that_completes_a_match_is_the_first_that_can(stops: list[str], pieces: list[str]) -> None:
    joined = ["".join(pieces[:number]) for number in range(1, len(pieces) + 1)]
    first = next((number for number, text in enumerate(joined, 1) if any(stop in text for stop in stops)), 0)
    assert run(stops, pieces)[2] == first


@given(STOPS, cut_texts())
def test_nothing_that_may_belong_to_a_stop_string_is_shown_and_nothing_else_is_held(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown, text = "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        text += piece
        if matcher.found:
            break
        begun = max(length for length in range(len(text) + 1) if _ends_in_a_beginning(text, length, stops))
        assert shown == text[: len(text) - begun]


def _ends_in_a_beginning(text: str, length: int, stops: list[str]) -> bool:
    return any(len(stop) > length and text.endswith(stop[:length]) for stop in stops)


def test_of_two_that_end_together_the_longest_wins() -> None:
    assert run(["b", "ab", "xb"], ["xa", "b"]) == ("x", True, 2)


def test_a_repetitive_stop_string_is_found_after_a_false_start() -> None:
    assert run(["aab"], ["a", "a", "a", "b", "x"]) == ("a", True, 4)


def test_a_match_only_begun_is_released_at_the_end() -> None:
    assert run(["STOP"], ["so ST", "O"]) == ("so STO", False, 0)


def test_nothing_is_shown_behind_a_stop_string() -> None:
    matcher = StopMatcher(["."])
    assert [matcher.push("one. two"), matcher.push("three"), matcher.close()] == ["one", "", ""]
