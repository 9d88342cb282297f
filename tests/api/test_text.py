"""Tokenizers: what templates make of conversations, and that a folder's settings of training do not matter."""

import threading
from pathlib import Path

import pytest

from api.text import ByteTokenizer, FolderTokenizer, OptionError, TemplateError, load_tokenizer
from backends.fake import FakeBackend
from tests.api.tokenizers_at_hand import write_folder

TURNS = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FolderTokenizer:
    return FolderTokenizer(folder)


def test_a_conversation_is_rendered_by_the_models_template(tokenizer: FolderTokenizer) -> None:
    text = tokenizer.render(TURNS, {})
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_knows_developers_gets_them(tmp_path: Path) -> None:
    template = "{% for turn in messages %}{{ turn.role }}{% if turn.role == 'developer' %}!{% endif %} {% endfor %}"
    assert FolderTokenizer(write_folder(tmp_path, template=template)).render(TURNS, {}) == "developer! user "


def test_options_reach_the_template(tokenizer: FolderTokenizer) -> None:
    assert tokenizer.render(TURNS, {"suffix": "<think>"}).endswith("assistant\n<think>")


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt", "conversation"])
def test_options_cannot_set_what_is_ours(tokenizer: FolderTokenizer, name: str) -> None:
    with pytest.raises(OptionError, match=name):
        tokenizer.render(TURNS, {name: "x"})


def test_what_a_template_refuses_is_told(tokenizer: FolderTokenizer) -> None:
    with pytest.raises(TemplateError, match="no system turn"):
        tokenizer.render([{"role": "system", "content": ""}], {"no_system": True})


def test_a_model_without_a_template_cannot_chat_but_complete(tmp_path: Path) -> None:
    bare = FolderTokenizer(write_folder(tmp_path, template=None))
    with pytest.raises(TemplateError, match="/v1/completions"):
        bare.render(TURNS, {})
    assert bare.decode(bare.encode("hello world", special=False)) == "hello world"


def test_a_bare_text_gets_what_the_model_wants_around_it(tokenizer: FolderTokenizer) -> None:
    bare, rendered = tokenizer.encode("hello", special=True), tokenizer.encode("hello", special=False)
    assert bare[1:] == rendered
    assert tokenizer.encode("<|im_start|>", special=False) == bare[:1]


def test_a_truncation_left_over_from_training_is_lifted(tmp_path: Path) -> None:
    cut = FolderTokenizer(write_folder(tmp_path, truncate_to=3))
    assert cut.decode(cut.encode("hello world " * 9, special=False)) == "hello world " * 9


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError)):
        FolderTokenizer(tmp_path)


def test_the_fake_backends_tokens_are_bytes() -> None:
    tokenizer = load_tokenizer(FakeBackend().info)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("é", special=True) == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3, 0xA9, 256]) == "é"
    assert tokenizer.render(TURNS, {}) == "developer: be brief\nuser: hello\nassistant: "


def test_special_tokens_are_left_out_of_decoded_text(tokenizer: FolderTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("hello<|im_end|>", special=True)) == "hello"


def test_a_folders_detokenizer_streams_its_text(tokenizer: FolderTokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    tokens = tokenizer.encode("häuser 漢字 🦄", special=False)
    assert "".join([*map(detokenizer.push, tokens), detokenizer.close()]) == "häuser 漢字 🦄"


def test_others_work_while_a_long_text_is_read(tokenizer: FolderTokenizer) -> None:
    """The library keeps the interpreter to itself for a single text."""
    ended, turns = threading.Event(), []

    def work() -> None:
        while not ended.wait(0.001):
            turns.append(None)

    worker = threading.Thread(target=work)
    worker.start()
    before = len(turns)
    tokens = tokenizer.encode("hello world, user " * 100_000, special=False)
    during = len(turns) - before
    ended.set()
    worker.join()
    assert during >= 10
    assert tokens == tokenizer._codec.encode("hello world, user " * 100_000, add_special_tokens=False).ids


def test_no_token_is_longer_than_it_says(tokenizer: FolderTokenizer) -> None:
    vocabulary = tokenizer._codec.get_vocab(with_added_tokens=True)
    assert max(len(tokenizer.decode([token])) for token in vocabulary.values()) <= tokenizer.longest
    assert tokenizer.longest < 100
