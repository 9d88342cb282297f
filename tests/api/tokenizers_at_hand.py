"""Small tokenizers made on the spot: byte-level BPE, and SentencePiece's way with byte fallback."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = (
    "{% if messages[0].role == 'system' and no_system %}{{ raise_exception('no system turn') }}{% endif %}"
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ suffix }}"
)


def byte_level() -> Tokenizer:
    """Every byte is a token; some pairs are merged; two special tokens; begins bare texts with <|im_start|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, häuser hello world 漢字 漢字"] * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Tokens 0 to 255 are bytes; then words with a leading space, which the first word of a text loses; then </s>."""
    words = ["▁hello", "▁world", "x", "▁", "漢"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary.update({word: 256 + index for index, word in enumerate(words)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def write_folder(folder: Path, *, template: str | None = TEMPLATE, truncate_to: int | None = None) -> Path:
    """A model folder as far as tokenizing goes."""
    tokenizer = byte_level()
    if truncate_to is not None:
        tokenizer.enable_truncation(truncate_to)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
