"""Between text and tokens: the tokenizer of the served model and its chat template.

Owns how a conversation becomes a prompt. Knows the model's folder; must not know HTTP, the engine or a tensor. Code
that a model folder brings along is never run (templates are, in their sandbox).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from api.detokenize import ByteDetokenizer, Detokenizer, StreamDetokenizer
from api.vocabulary import TokenBytes
from backends.base import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = Mapping[str, Any]
"""One message of a conversation: `role` and `content`; where tools are used, `tool_calls` or `tool_call_id`, too."""

ToolObject = Mapping[str, Any]
"""A function that may be called, in the form of OpenAI's `tools`."""

_OWN_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of rendering that are ours to set, not a client's."""


class TemplateError(ValueError):
    """A conversation that the model's chat template does not take; says why."""


class OptionError(TemplateError):
    """An option of rendering that is not the client's to set."""


class Tokenizer(Protocol):
    """A model's text codec, for any thread. Implemented by `FolderTokenizer` and `ByteTokenizer`."""

    @property
    def template(self) -> str:
        """The source of the chat template that is used with tools; empty if there is none."""
        ...

    def render(self, turns: Sequence[Turn], options: Mapping[str, Any], tools: Sequence[ToolObject] = (), /) -> str:
        """The text that asks the model for the next turn; `options` are further variables of the template, `tools` are
        shown by a template that knows how. Raises TemplateError.
        """
        ...

    @property
    def longest(self) -> int:
        """No token stands for more characters than this, as far as can be told."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The tokens of a text; `special` adds what the model wants around a bare text (a begin-of-text token)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The whole text of a sequence, special tokens left out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, which may be half a character; none for an unknown token."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one lane."""
        ...


def load_tokenizer(info: ModelInfo) -> Tokenizer:
    """The tokenizer that belongs to a loaded model; slow, so call it off the event loop. Raises ValueError."""
    return ByteTokenizer() if info.folder is None else FolderTokenizer(Path(info.folder))


class ByteTokenizer:
    """The fake backend's: tokens 0 to 255 are bytes of UTF-8, others have no text. Its template names each speaker."""

    @property
    def template(self) -> str:
        """It is no text."""
        return ""

    def render(self, turns: Sequence[Turn], _options: Mapping[str, Any], _tools: Sequence[ToolObject] = (), /) -> str:
        """One line per turn, then the assistant's name. It has no use for options or tools."""
        return "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns) + "assistant: "

    @property
    def longest(self) -> int:
        """A byte is a token."""
        return 1

    def encode(self, text: str, *, special: bool) -> list[int]:  # noqa: ARG002
        """One token per byte; there is nothing special to add."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte."""
        return bytes((token,)) if token < 256 else b""

    def detokenizer(self) -> Detokenizer:
        """UTF-8, byte by byte."""
        return ByteDetokenizer()


class FolderTokenizer:
    """The tokenizer of a model folder, by transformers and tokenizers (the Rust library; it is safe in any thread)."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError for a folder without a fast tokenizer."""
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not loaded.is_fast:
            raise ValueError(f"the model in {folder} has no tokenizer.json, and slow tokenizers are not supported")
        self._template: PreTrainedTokenizerBase = loaded
        self._codec = loaded.backend_tokenizer
        self._codec.no_truncation()  # a tokenizer.json may carry the settings of its training
        self._codec.no_padding()
        self._token_bytes = TokenBytes(self._codec)
        spelled = max(map(len, self._codec.get_vocab(with_added_tokens=True)), default=1)
        self.longest = spelled * (1 if self._codec.normalizer is None else 2)  # a normalizer may drop characters

    @property
    def template(self) -> str:
        """Of several named templates the one that transformers takes when there are tools."""
        template = self._template.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return str(template or "")

    def render(self, turns: Sequence[Turn], options: Mapping[str, Any], tools: Sequence[ToolObject] = (), /) -> str:
        """The model's own chat template; a `developer` is its `system` unless the template knows the name."""
        template = self._template.chat_template
        if template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        own = sorted(_OWN_ARGUMENTS & options.keys())
        if own:
            raise OptionError(f"chat_template_kwargs must not set {own[0]}")
        conversation = list(turns)
        if "developer" not in str(template):
            conversation = [{**turn, "role": turn["role"].replace("developer", "system")} for turn in turns]
        try:
            text = self._template.apply_chat_template(
                conversation, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # the named boundary of a template: foreign code, and what it raises is up to it
            raise TemplateError(f"the model's chat template refused the conversation: {error}") from error
        return str(text)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Releases the GIL while it works, which `encode` of the library does for many texts only."""
        return list(self._codec.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """As the model's decoder has it."""
        return str(self._codec.decode(list(tokens), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """As the vocabulary spells them."""
        return self._token_bytes(token)

    def detokenizer(self) -> Detokenizer:
        """Streams over the Rust decoder."""
        return StreamDetokenizer(self._codec)
