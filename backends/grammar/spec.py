"""What a client asks of the generated text, as values. Dialects make them; `backends.grammar.compile` reads them."""

from enum import StrEnum

import msgspec


class SpecKind(StrEnum):
    """In which language `ConstraintSpec.text` is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema, as JSON text."""
    JSON_OBJECT = "json_object"
    """Any JSON object; `text` is empty."""
    REGEX = "regex"
    EBNF = "ebnf"
    """A grammar in xgrammar's GBNF dialect, whose first rule is `root`. Its characters are code points without the
    surrogates: `[^a]` is every other one, line breaks included. What xgrammar reads but does not enforce is refused:
    look-ahead, `max_chars`, `Regex` and `Substring`.
    """
    CHOICE = "choice"
    """A JSON array of strings, one of which is the text."""
    STRUCTURAL_TAG = "structural_tag"
    """An xgrammar structural tag, as JSON text."""


class ConstraintSpec(msgspec.Struct, frozen=True):
    """One constraint. `text` is what the client sent, not yet looked at."""

    kind: SpecKind
    text: str = ""
    after: tuple[int, ...] = ()
    """The constraint begins behind the first occurrence of these tokens in the generated text; empty: at once. Until
    then everything may be drawn.
    """
