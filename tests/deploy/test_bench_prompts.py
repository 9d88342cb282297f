"""The prompts: enough of them, unlike each other, and never the same twice."""

from collections import Counter
from pathlib import Path

import pytest

from deploy.bench.prompts import (
    Message,
    Prompt,
    PromptFileError,
    copying_prompts,
    draw,
    ordinary_prompts,
    read_prompts,
)
from deploy.bench.texts import PASSAGES


def test_ordinary_prompts_are_many_different_and_of_unequal_length() -> None:
    prompts = ordinary_prompts()
    words = [len(prompt.text.split()) for prompt in prompts]
    assert len(prompts) >= 24
    assert len({prompt.text for prompt in prompts}) == len({prompt.name for prompt in prompts}) == len(prompts)
    assert min(words) < 20
    assert max(words) > 100
    assert len(set(words)) >= 12


def test_copying_prompts_hold_passages_that_do_not_repeat_themselves() -> None:
    """No four words come twice, in one passage or in two: a draft from the text can only come from the prompt."""
    assert len(copying_prompts()) >= 8
    assert all(80 <= len(passage.split()) <= 130 for passage in PASSAGES)
    runs = Counter(
        tuple(words[start : start + 4])
        for words in (passage.split() for passage in PASSAGES)
        for start in range(len(words) - 3)
    )
    assert runs.most_common(1)[0][1] == 1
    assert all(passage in prompt.text for passage, prompt in zip(PASSAGES, copying_prompts(), strict=True))


def test_draws_go_round_and_no_two_prompts_of_a_comparison_begin_alike() -> None:
    prompts = ordinary_prompts()[:3]
    drawn = draw(prompts, 5, start=2, label="8-0") + draw(prompts, 5, start=7, label="8-1")
    assert [prompt.name for prompt in drawn[:5]] == [prompts[place].name for place in (2, 0, 1, 2, 0)]
    openings = [prompt.messages[0].content.partition(".")[0] for prompt in drawn]
    assert len(set(openings)) == 10
    assert [message.role for message in drawn[0].messages] == ["system", "user"]
    assert drawn[0].messages[1:] == prompts[2].messages
    assert draw(prompts, 5, start=2, label="8-0") == drawn[:5]


def test_a_system_message_is_opened_too_and_none_is_added() -> None:
    asked = Prompt("p", (Message("system", "Be brief."), Message("user", "Why?")))
    (drawn,) = draw([asked], 1, start=0, label="1-0")
    assert drawn.messages == (Message("system", "Session 1-0-0. Be brief."), Message("user", "Why?"))


def test_a_file_of_prompts_may_say_it_in_three_ways(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "One?", "extra": 1}\n\n{"id": 81, "category": "x", "turns": ["Two?", "And then?"]}\n'
        '{"id": "c", "messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Drei €?"}]}\n',
        encoding="utf-8",
    )
    assert read_prompts(path) == (
        Prompt("1", (Message("user", "One?"),)),
        Prompt("81", (Message("user", "Two?"),)),
        Prompt("c", (Message("system", "Brief."), Message("user", "Drei €?"))),
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2"),
        ('{"question": "a"}', "line 1"),
        ('{"turns": [1]}', "line 1"),
        ("not json", "line 1"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=complaint):
        read_prompts(path)
