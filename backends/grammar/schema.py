"""A JSON schema as a grammar of exactly the values that satisfy it, each in one spelling.

xgrammar has a converter of its own; it leaves out or weakens what it does not know, so schemas are translated here, and
whatever cannot be said exactly is refused (`SchemaError`). What a generated text looks like:

- One space behind every comma and colon, none elsewhere: the whitespace of Python's `json.dumps`. It is fixed, so that
  most of an object's text is forced, and bounded, so that a model cannot go on with blanks for ever.
- Properties that a schema names come first, in the order in which it names them; then, in any order, those that are
  only required; then, unless they are forbidden, further ones, which never have the name of one of the others.
- Strings without a pattern, a format or forbidden values may use every escape of JSON; other strings, and the names of
  further properties, escape what must be escaped, in the usual way, and nothing else. So their letters are known.
- Every text is valid Unicode once it is decoded: a string holds no surrogate, neither encoded in UTF-8 as if it were a
  character nor by an escape that is not one of a pair. Strict decoders take neither.
- A string that may have more than 32 lengths ends when its *text* is as long as the longest: an escape counts as long
  as it is written. So a few strings with escapes are left out where they come near the limit; none is too long.
- Numbers with a bound, and those of which some are forbidden, have no exponent; integers have neither exponent nor
  fraction.

But for those strings, every valid value has at least one such spelling. A name that occurs twice in an object is
possible among the further ones; both values satisfy the schema.
"""

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from backends.grammar.arrays import ArrayRules
from backends.grammar.automaton import TooLargeError
from backends.grammar.cases import Case, Cases, Conjunction, Literal, Size
from backends.grammar.document import Document, SchemaError, is_number
from backends.grammar.ebnf import UNESCAPED_IN_JSON, Part, Ref, Rules, Times, character_class, literal
from backends.grammar.instance import equal, spellings, type_of, written
from backends.grammar.languages import number_language, string_language
from backends.grammar.objects import ObjectRules

_MAX_STRING_LEAST = 4096
_MAX_EXACT_LENGTHS = 32
"""How many lengths a string may have for each to have a rule of its own."""
_ANY = "any"
_BASE: dict[str, list[list[Part]]] = {
    _ANY: [[Ref("string")], [Ref("number")], [Ref("object")], [Ref("array")], ['"true"'], ['"false"'], ['"null"']],
    "string": [['"\\""', Ref("characters")]],
    "characters": [['"\\""'], [Ref("character"), Ref("characters")]],
    "character": [
        [character_class(UNESCAPED_IN_JSON)],
        ['"\\\\"', "[\\u0022\\u005C/bfnrt]"],
        ['"\\\\u"', "[0-9a-cefA-CEF]", "[0-9a-fA-F]{3}"],
        ['"\\\\u"', "[dD]", "[0-7]", "[0-9a-fA-F]{2}"],
        ['"\\\\u"', "[dD]", "[89abAB]", "[0-9a-fA-F]{2}", '"\\\\u"', "[dD]", "[c-fC-F]", "[0-9a-fA-F]{2}"],
    ],
    "number": [['"-"?', '("0" | [1-9] [0-9]*)', '("." [0-9]+)?', "([eE] [+\\-]? [0-9]+)?"]],
    "integer": [['"0"'], ['"-"?', "[1-9] [0-9]*"]],
    "object": [['"{}"'], ['"{"', Ref("member"), Ref("members")]],
    "members": [['"}"'], ['", "', Ref("member"), Ref("members")]],
    "member": [[Ref("string"), '": "', Ref(_ANY)]],
    "array": [['"[]"'], ['"["', Ref(_ANY), Ref("elements")]],
    "elements": [['"]"'], ['", "', Ref(_ANY), Ref("elements")]],
}


def schema_grammar(text: str) -> str:
    """The GBNF grammar of a JSON schema. Raises GrammarError."""
    document = Document(text)
    return _Translation(document).grammar()


class _Translation:
    """One schema's way into rules: a rule for every conjunction of subschemas that some value must satisfy."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._cases = Cases(document)
        self._rules = Rules()
        for name, alternatives in _BASE.items():
            self._rules.add(name, alternatives)
        self._names: dict[Conjunction, str] = {}
        self._waiting: list[tuple[str, Conjunction]] = []

    def grammar(self) -> str:
        root = self._value(frozenset({Literal(self._document.root.pointer)}))
        while self._waiting:
            name, conjunction = self._waiting.pop()
            where = min(conjunction).pointer
            try:
                self._rules.add(name, self._alternatives(self._cases.of(conjunction), where))
            except TooLargeError as error:
                raise SchemaError(where, str(error)) from None
        text = self._rules.text(root.name)
        if text is None:
            raise SchemaError("#", "nothing satisfies this schema")
        return text

    def _value(self, conjunction: Conjunction) -> Ref:
        """The rule of the values that satisfy all of these."""
        if not conjunction:
            return Ref(_ANY)
        name = self._names.get(conjunction)
        if name is None:
            name = self._names[conjunction] = self._rules.new("v")
            self._waiting.append((name, conjunction))
        return Ref(name)

    def _alternatives(self, cases: Iterable[Case], where: str) -> Iterator[list[Part]]:
        for case in cases:
            if case.values is not None:
                yield from _listed(case.values)
                continue
            if case == Case():
                yield [Ref(_ANY)]
                continue
            for value in (None, True, False):
                if type_of(value) in case.types and not any(equal(value, other) for other in case.excluded):
                    yield [literal(written(value))]
            yield from self._numbers(case)
            if "string" in case.types:
                yield self._string(case)
            if "array" in case.types:
                yield self._array(case, where)
            if "object" in case.types:
                yield self._object(case, where)

    # ---- numbers and strings -----------------------------------------------------------------------------------------

    def _numbers(self, case: Case) -> Iterator[list[Part]]:
        kinds = case.types & {"integer", "fraction"}
        excluded = [Decimal(value) for value in case.excluded if is_number(value)]
        if not kinds:
            return
        plain = not (case.low or case.high or case.multiples or excluded)
        if plain and len(kinds) > 1:
            yield [Ref("number")]
        elif plain and "integer" in kinds:
            yield [Ref("integer")]
        else:
            language = number_language(case, kinds, excluded)
            if not language.empty:
                yield [self._rules.add_automaton("n", language, json_string=False)]

    def _string(self, case: Case) -> list[Part]:
        excluded = [value for value in case.excluded if isinstance(value, str)]
        if case.languages or excluded:
            language = string_language(case, excluded)
            if language.empty:
                return [self._rules.never()]
            return ['"\\""', self._rules.add_automaton("s", language, json_string=True, end='"')]
        if case.length == Size():
            return [Ref("string")]
        return self._string_of_length(case.length)

    def _string_of_length(self, length: Size) -> list[Part]:
        """Without repeating a rule: inside of such a repetition, a mask takes xgrammar 0.5 s."""
        if not length.possible:
            return [self._rules.never()]
        if length.least > _MAX_STRING_LEAST:
            raise TooLargeError(f"a string of more than {_MAX_STRING_LEAST} characters at least")
        begin: list[Part] = ['"\\""', *([Ref("character")] * length.least)]
        if length.most is None:
            return [*begin, Ref("characters")]
        rest = length.most - length.least
        if rest > _MAX_EXACT_LENGTHS:
            body = self._rules.add(self._rules.new("b"), [[Times("character", 0, None)]])
            self._rules.limit(body.name, rest)
            return [*begin, body, '"\\""']
        following = self._rules.add(self._rules.new("l"), [['"\\""']])
        for _ in range(rest):
            following = self._rules.add(self._rules.new("l"), [['"\\""'], [Ref("character"), following]])
        return [*begin, following]

    # ---- arrays and objects ------------------------------------------------------------------------------------------

    def _array(self, case: Case, where: str) -> list[Part]:
        _refuse_excluded(case, list, where)
        if not case.arrays and case.items == Size():
            return [Ref("array")]
        return ArrayRules(self._rules, self._document, self._cases, self._value).array(case)

    def _object(self, case: Case, where: str) -> list[Part]:
        _refuse_excluded(case, dict, where)
        if not (case.objects or case.required or case.absent or case.parts) and case.keys == Size():
            return [Ref("object")]
        return ObjectRules(self._rules, self._document, self._cases, self._value, case).object(where)


def _listed(values: Iterable[Any]) -> Iterator[list[Part]]:
    for value in values:
        for text in spellings(value):
            yield [literal(text)]


def _refuse_excluded(case: Case, kind: type, where: str) -> None:
    if any(isinstance(value, kind) for value in case.excluded):
        name = "an array" if kind is list else "an object"
        raise SchemaError(where, f"that a value is not {name} of this content (not, oneOf, if) cannot be enforced")
