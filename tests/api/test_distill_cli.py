"""What `paceline distill` asks: its own prompts, or those of a file, in the model's own template."""

from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import app
from api.distill_prompts import PromptFileError, digest_of, encoded, opening_of, read_prompts, refuse_too_long
from api.text import ByteTokenizer, TemplateError
from api.training_prompts import Asked, training_prompts
from backends.mlx.distill.asking import Opening


def test_our_own_prompts_are_many_and_the_same_for_a_seed() -> None:
    first = list(islice(training_prompts(1), 2000))
    assert first == list(islice(training_prompts(1), 2000))
    assert len(set(first)) > 1800
    assert len(set(first) & set(islice(training_prompts(2), 2000))) < 400
    assert all("{" not in each.user and each.user for each in first)
    assert 0.1 < sum(bool(each.system) for each in first) / 2000 < 0.2


def test_a_file_may_hold_texts_turns_and_conversations(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "How do bees fly?\n"
        "\n"
        '{"prompt": "Why?", "id": 3}\n'
        '{"turns": ["First.", "Second."]}\n'
        '{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]}\n'
    )
    assert list(read_prompts(file)) == [
        Asked("How do bees fly?"),
        Asked("Why?"),
        Asked("First."),
        Asked("Hello", "Be kind."),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken", "line 2"),
        ('{"prompt": 3}', "line 2"),
        ('{"messages": [{"role": "assistant", "content": "I speak first."}]}', "nothing is asked"),
        ("{}", "nothing is asked"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"fine\n{line}\n")
    with pytest.raises(PromptFileError, match=says):
        list(read_prompts(file))


def test_prompts_are_rendered_and_answered_in_several_ways() -> None:
    asked = [Asked("One"), Asked("Two", "A system."), Asked("Three"), Asked("Four")]
    prompts = list(encoded(ByteTokenizer(), asked, 40))
    texts = [bytes(prompt.tokens).decode() for prompt in prompts]
    assert texts[:2] == ["user: One\nassistant: ", "system: A system.\nuser: Two\nassistant: "]
    assert [prompt.sampling.temperature for prompt in prompts] == [0.0, 0.5, 0.0, 1.0]
    assert [prompt.sampling.seed for prompt in prompts] == [40, 41, 42, 43]


@pytest.mark.parametrize(("text", "fits"), [("a" * 50, True), ("a" * 51, False)])
def test_a_prompt_must_leave_room_for_its_answer(text: str, fits: bool) -> None:
    prompts = list(encoded(ByteTokenizer(), [Asked("short"), Asked(text)], 0))
    context = len("user: \nassistant: ") + 50 + 10
    if fits:
        refuse_too_long(prompts, 10, context)
    else:
        with pytest.raises(PromptFileError, match="prompt 2 has 69 tokens"):
            refuse_too_long(prompts, 10, context)


def test_other_prompts_have_another_digest() -> None:
    one, other = (list(encoded(ByteTokenizer(), [Asked(text)], 0)) for text in ("One", "Two"))
    opening = opening_of(ByteTokenizer())
    assert digest_of(one, opening) == digest_of(list(one), opening)
    assert digest_of(one, opening) != digest_of(other, opening)
    assert len({digest_of(one, each) for each in (opening, Opening((1,), opening.ends), None)}) == 3


def test_an_opening_is_the_template_up_to_what_the_user_says_and_the_first_token_behind_it() -> None:
    opening = opening_of(ByteTokenizer())
    assert bytes(opening.tokens) == b"user:", "a blank belongs to the word behind it"
    assert opening.ends == {ord("\n")}


def test_a_template_that_does_not_show_what_a_user_says_has_no_opening() -> None:
    class Silent(ByteTokenizer):
        def render(self, *_: object) -> str:
            return "assistant: "

    with pytest.raises(TemplateError, match="does not show"):
        opening_of(Silent())


def test_a_file_without_prompts_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    done = CliRunner().invoke(app, ["distill", "any", "--prompts", str(tmp_path / "empty")])
    assert (done.exit_code, "no prompts" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere-to-be-found"], "neither an installed model"),
        (["nowhere-to-be-found", "--prompts", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(words: list[str], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["distill", *words], env={"PACELINE_HOME": str(tmp_path)})
    assert done.exit_code == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
