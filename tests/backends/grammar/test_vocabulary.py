"""What tokens stand for, against the tokenizers' own decoders; and special tokens, which no mask allows."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from backends.base import ModelInfo
from backends.grammar.matcher import XGrammarMatcher
from backends.grammar.spec import SpecKind
from backends.grammar.translate import translate
from backends.grammar.vocabulary import Vocabulary, load_vocabulary
from backends.grammar.xgrammar_core import CoreCompiler
from tests.api.tokenizers_at_hand import byte_fallback, byte_level
from tests.backends.grammar.grammars import allowed, byte_vocabulary


def info(folder: Path | None, vocab_size: int, stops: set[int]) -> ModelInfo:
    return ModelInfo("model", None if folder is None else str(folder), vocab_size, 1024, frozenset(stops), {}, "", 0)


def loaded(tokenizer: Tokenizer, folder: Path, vocab_size: int, stops: set[int]) -> Vocabulary:
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_vocabulary(info(folder, vocab_size, stops))


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "with a dummy prefix"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    if request.param == "byte level":
        tokenizer, stop = byte_level(), "<|im_end|>"
    else:
        tokenizer, stop = byte_fallback(), "</s>"
        steps = [normalizers.Prepend("▁")] if request.param == "with a dummy prefix" else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    folder = tmp_path_factory.mktemp("model")
    return tokenizer, loaded(tokenizer, folder, tokenizer.get_vocab_size() + 37, {tokenizer.token_to_id(stop)})


@given(text=st.text(max_size=20))
def test_a_split_is_the_text(model: tuple[Tokenizer, Vocabulary], text: str) -> None:
    _, vocabulary = model
    tokens = vocabulary.split(text)
    assert vocabulary.join(tokens) in ((text.encode(),) if tokens else (b"",))


@given(text=st.text(st.sampled_from("helo wrd,\n漢字é"), min_size=1, max_size=20))
def test_a_split_of_ordinary_text_is_found(model: tuple[Tokenizer, Vocabulary], text: str) -> None:
    tokenizer, vocabulary = model
    tokens = vocabulary.split(text)
    assert vocabulary.join(tokens) == text.encode()
    assert tokenizer.decode([*tokenizer.encode("x").ids, *tokens]).endswith(text)


def test_rows_without_a_token_and_special_tokens_have_no_bytes(model: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = model
    assert len(vocabulary.tokens) == tokenizer.get_vocab_size() + 37
    special = [token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special]
    empty = {token for token, text in enumerate(vocabulary.tokens) if not text}
    assert empty == {*special, *range(tokenizer.get_vocab_size(), len(vocabulary.tokens))}


def test_no_mask_allows_a_special_token_but_the_end(model: tuple[Tokenizer, Vocabulary]) -> None:
    _, vocabulary = model
    compiler = CoreCompiler(vocabulary.tokens, vocabulary.stop_tokens)
    matcher = XGrammarMatcher(compiler.grammar(translate(SpecKind.REGEX, "[^]*").text), vocabulary)
    words = (len(vocabulary.tokens) + 31) // 32
    tokens = allowed(matcher, words, len(vocabulary.tokens))
    assert [token for token in tokens if not vocabulary.tokens[token]] == list(vocabulary.stop_tokens)
    for token, text in enumerate(vocabulary.tokens):
        accepted = matcher.accept(token)
        assert accepted == (token in tokens)
        matcher.rollback(int(accepted))
        assert accepted or not text or text[0] >= 0x80


@given(
    st.lists(st.text(st.sampled_from('helo wrd{}":漢é'), min_size=1, max_size=12), min_size=1, max_size=3, unique=True)
)
def test_forced_text_is_what_must_come_but_that_the_text_may_end_in_it(
    model: tuple[Tokenizer, Vocabulary], texts: list[str]
) -> None:
    _, vocabulary = model
    compiler = CoreCompiler(vocabulary.tokens, vocabulary.stop_tokens)
    matcher = XGrammarMatcher(compiler.grammar(translate(SpecKind.CHOICE, json.dumps(texts)).text), vocabulary)
    forced = matcher.forced(30)
    said = vocabulary.join(forced)
    assert all(text.encode().startswith(said) or said.startswith(text.encode()) for text in texts)
    assert all(matcher.accept(token) for token in forced)
    if len(texts) == 1:
        assert vocabulary.join(forced) == texts[0].encode() or not forced


def test_bytes_are_their_own_tokens() -> None:
    vocabulary = byte_vocabulary()
    assert vocabulary.split("aé") == (0x61, 0xC3, 0xA9)
    assert vocabulary.stop_tokens == (256,)


def test_a_stop_token_beyond_the_logits_is_none(tmp_path: Path) -> None:
    assert loaded(byte_level(), tmp_path, 280, {1, 5000}).stop_tokens == (1,)


def test_vocabularies_are_told_apart(tmp_path: Path) -> None:
    first, second = loaded(byte_level(), tmp_path, 280, {1}), loaded(byte_level(), tmp_path, 280, {0, 1})
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == loaded(byte_level(), tmp_path, 280, {1}).fingerprint


def test_a_decoder_that_is_not_understood(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"a": 0, "##b": 1}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        loaded(tokenizer, tmp_path, 3, {2})


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_vocabulary(info(tmp_path, 10, set()))
