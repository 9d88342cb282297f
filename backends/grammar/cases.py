"""What a schema says of one value, as a list of alternatives that a grammar can be made of.

A value may have to satisfy several subschemas at once, and must not satisfy others: a *conjunction* of `Literal`s. It
is brought into disjunctive form: each `Case` names the types that a value may have and, per type, plain facts of it.
Both `allOf` and `$ref` only add to the conjunction; `anyOf`, `oneOf`, `if`, `not` and dependencies branch. Whatever has
no such form is refused, never dropped. Owns the meaning of combining keywords; must not know how anything is written.
"""

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from backends.grammar.automaton import Automaton
from backends.grammar.decimals import Bound
from backends.grammar.document import Document, Place, SchemaError
from backends.grammar.instance import Validator, property_places, string_languages, types_named

MAX_CASES = 512
"""Alternatives of one value."""
_TAG_DEPTH = 3
"""How deep in an object we look for a property that tells the branches of a union apart."""
ALL_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_NUMBERS = frozenset({"integer", "fraction"})
_STRING = frozenset({"string"})
_ARRAY = frozenset({"array"})
_OBJECT = frozenset({"object"})
_ARRAY_WORDS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "uniqueItems", "contains")
_OBJECT_WORDS = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "required",
)


class Literal(NamedTuple):
    """A subschema that a value satisfies, or does not."""

    pointer: str
    positive: bool = True

    @property
    def negated(self) -> "Literal":
        """The opposite."""
        return Literal(self.pointer, not self.positive)


Conjunction = frozenset[Literal]


class Size(msgspec.Struct, frozen=True):
    """How long a string, array or object may be."""

    least: int = 0
    most: int | None = None

    def within(self, least: int = 0, most: int | None = None) -> "Size":
        """Both."""
        known = [size for size in (self.most, most) if size is not None]
        return Size(max(self.least, least), min(known) if known else None)

    @property
    def possible(self) -> bool:
        """Whether anything is so long."""
        return self.most is None or self.least <= self.most


class Case(msgspec.Struct, frozen=True):
    """One alternative. Facts of a type count only for values of that type."""

    types: frozenset[str] = ALL_TYPES
    values: tuple[Any, ...] | None = None
    """If not None, the value is one of these, and nothing else here counts."""
    excluded: tuple[Any, ...] = ()
    low: tuple[Bound, ...] = ()
    high: tuple[Bound, ...] = ()
    multiples: tuple[Decimal, ...] = ()
    languages: tuple[tuple[Automaton, bool], ...] = ()
    """Of strings: those it is in, and those it is not in."""
    length: Size = Size()
    items: Size = Size()
    keys: Size = Size()
    arrays: tuple[Place, ...] = ()
    """Subschemas whose keywords for arrays count."""
    objects: tuple[Place, ...] = ()
    """Subschemas whose keywords for objects count."""
    required: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()
    parts: tuple[tuple[str, Literal], ...] = ()
    """Further subschemas of properties."""

    def typed(self, types: Iterable[str]) -> "Case":
        """Of these types only."""
        return msgspec.structs.replace(self, types=self.types & frozenset(types))

    def with_facts(self, **facts: Any) -> "Case":
        """These facts besides."""
        return msgspec.structs.replace(self, **facts)


class _Task(NamedTuple):
    """Something of a subschema that branches, put off until everything that does not is known."""

    word: str
    place: Place
    trail: frozenset[Literal]


class _Branch(NamedTuple):
    """How far the expansion of a conjunction has come."""

    case: Case
    literals: tuple[tuple[Literal, frozenset[Literal]], ...]
    """Not yet looked at, each with the literals that led to it."""
    tasks: tuple[_Task, ...]
    taken: tuple[Literal, ...]
    """All literals of this branch."""

    def plus(self, literals: Iterable[Literal], trail: frozenset[Literal], case: Case | None = None) -> "_Branch":
        """Whatever the branch has already is not looked at twice; what contradicts it leaves nothing."""
        case = self.case if case is None else case
        added: list[Literal] = []
        for literal in literals:
            if literal in trail:
                raise SchemaError(literal.pointer, "it refers to itself without going into a value")
            if literal.negated in self.taken or literal.negated in added:
                case = case.typed(())
            if literal not in self.taken and literal not in added:
                added.append(literal)
        waiting = (*((literal, trail) for literal in added), *self.literals)
        return _Branch(case, waiting, self.tasks, (*self.taken, *added))

    def with_case(self, case: Case) -> "_Branch":
        return self._replace(case=case)


class Cases:
    """Expands the conjunctions of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._validator = Validator(document)

    def of(self, conjunction: Conjunction) -> list[Case]:
        """The alternatives; none if nothing satisfies it. Raises SchemaError."""
        literals = tuple(sorted(conjunction))
        start = _Branch(Case(), tuple((literal, frozenset()) for literal in literals), (), literals)
        found: list[Case] = []
        waiting = [start]
        while waiting:
            branch = waiting.pop()
            if not branch.case.types:
                continue
            following = self._advance(branch)
            if following is None:
                found.append(branch.case)
            else:
                waiting.extend(reversed(list(following)))
            if len(found) + len(waiting) > MAX_CASES:
                raise SchemaError(literals[0].pointer, f"it has more than {MAX_CASES} alternatives")
        return found

    def _advance(self, branch: _Branch) -> Iterable[_Branch] | None:
        """The branches that one step makes of a branch; None if it is done."""
        if branch.case.values is not None:
            values = tuple(value for value in branch.case.values if self._holds(value, branch.taken))
            done = branch.case.with_facts(values=values, types=ALL_TYPES if values else frozenset())
            return None if done == branch.case else [_Branch(done, (), (), branch.taken)]
        if branch.literals:
            (literal, trail), *rest = branch.literals
            place = self._document.at(literal.pointer)
            branch = branch._replace(literals=tuple(rest))
            led = trail | {literal}
            return self._assert(branch, place, led) if literal.positive else self._deny(branch, place, led)
        if branch.tasks:
            task, *others = branch.tasks
            return self._branch(branch._replace(tasks=tuple(others)), task)
        return None

    def _holds(self, value: Any, literals: Iterable[Literal]) -> bool:
        return all(
            self._validator.holds(value, self._document.at(literal.pointer)) == literal.positive for literal in literals
        )

    def literal(self, place: Place, *keys: str | int, positive: bool = True) -> Literal:
        """A subschema's subschema."""
        return Literal(self._document.child(place, *keys).pointer if keys else place.pointer, positive)

    # ---- what holds --------------------------------------------------------------------------------------------------

    def _assert(self, branch: _Branch, place: Place, trail: frozenset[Literal]) -> list[_Branch]:
        if isinstance(place.value, bool):
            return [branch] if place.value else []
        words = place.keywords
        if "$ref" in words:
            branch = branch.plus([Literal(self._document.target(place).pointer)], trail)
            if self._document.only_reference(place):
                return [branch]
        if "const" in words or "enum" in words:
            # The validator asks each value for everything else, this subschema's other keywords included.
            values = (words["const"],) if "const" in words else tuple(words["enum"])
            return [branch.with_case(branch.case.with_facts(values=values))]
        if "allOf" in words:
            parts = range(len(words["allOf"]))
            branch = branch.plus((self.literal(place, "allOf", index) for index in parts), trail)
        tasks = [
            _Task(word, place, trail)
            for word in ("anyOf", "oneOf", "if", "not", "dependencies", "dependentRequired", "dependentSchemas")
            if word in words
        ]
        branch = branch._replace(tasks=(*branch.tasks, *tasks))
        return [branch.with_case(_with_plain_facts(branch.case, place))]

    def _branch(self, branch: _Branch, task: _Task) -> Iterable[_Branch]:
        place, trail = task.place, task.trail
        if task.word == "anyOf":
            parts = range(len(place.keywords["anyOf"]))
            return [branch.plus([self.literal(place, "anyOf", index)], trail) for index in parts]
        if task.word == "oneOf":
            return self._one_of(branch, place, trail)
        if task.word == "not":
            return [branch.plus([self.literal(place, "not", positive=False)], trail)]
        if task.word == "if":
            return self._if(branch, place, trail)
        return self._dependencies(branch, place, trail, task.word)

    def _one_of(self, branch: _Branch, place: Place, trail: frozenset[Literal]) -> list[_Branch]:
        """Each of them, without those others that a value could satisfy as well."""
        literals = [self.literal(place, "oneOf", index) for index in range(len(place.keywords["oneOf"]))]
        found = []
        for literal in literals:
            others = [
                other.negated
                for other in literals
                if other != literal and not self._exclude_each_other(literal, other, branch.case)
            ]
            found.append(branch.plus([literal, *others], trail))
        return found

    def _exclude_each_other(self, left: Literal, right: Literal, known: Case) -> bool:
        """Whether it is plain that no value of a case satisfies both; False where it is not, or too hard to say."""
        try:
            return all(self._impossible(_both(known, case), 0) for case in self.of(frozenset({left, right})))
        except SchemaError:
            return False

    def _impossible(self, case: Case, depth: int) -> bool:
        """Whether it is plain that no value is of a case: it has to be an object, and a required property cannot be."""
        if case.values is not None:
            return not case.values
        if case.types != _OBJECT or depth > _TAG_DEPTH:
            return not case.types
        return any(
            all(self._impossible(inner, depth + 1) for inner in self.of(self.property(case, key)))
            for key in required_keys(case)
        )

    def property(self, case: Case, key: str) -> Conjunction:
        """What a case says of a property. A property that must not be there has `false`."""
        literals = {
            Literal(schema.pointer) for place in case.objects for schema in property_places(self._document, place, key)
        }
        return frozenset(literals | {literal for name, literal in case.parts if name == key})

    def _if(self, branch: _Branch, place: Place, trail: frozenset[Literal]) -> Iterator[_Branch]:
        words = place.keywords
        for word, positive in (("then", True), ("else", False)):
            literals = [self.literal(place, "if", positive=positive)]
            if word in words:
                literals.append(self.literal(place, word))
            yield branch.plus(literals, trail)

    def _dependencies(self, branch: _Branch, place: Place, trail: frozenset[Literal], word: str) -> Iterable[_Branch]:
        branches = [branch]
        for key, entry in place.keywords[word].items():
            following = []
            for known in branches:
                case = known.case
                following.append(known.with_case(case.with_facts(absent=case.absent | {key})))
                # A value that is no object has no such property: it is among those of the first branch.
                present = case.typed(_OBJECT)
                if isinstance(entry, list):
                    required = (*case.required, key, *entry)
                    following.append(known.with_case(present.with_facts(required=required)))
                else:
                    present = present.with_facts(required=(*case.required, key))
                    following.append(known.plus([self.literal(place, word, key)], trail, present))
            branches = [known for known in following if known.case.types]
        return branches

    # ---- what does not hold ------------------------------------------------------------------------------------------

    def _deny(self, branch: _Branch, place: Place, trail: frozenset[Literal]) -> list[_Branch]:
        """One branch for each keyword that may be what the value fails."""
        if isinstance(place.value, bool):
            return [] if place.value else [branch]
        words = place.keywords
        found: list[_Branch] = []
        if "$ref" in words:
            found.append(branch.plus([Literal(self._document.target(place).pointer, False)], trail))
            if self._document.only_reference(place):
                return found
        found.extend(self._deny_combined(branch, place, trail))
        case = branch.case
        if "type" in words:
            found.append(branch.with_case(case.typed(ALL_TYPES - types_named(words["type"]))))
        if "const" in words or "enum" in words:
            values = (words["const"],) if "const" in words else tuple(words["enum"])
            found.append(branch.with_case(case.with_facts(excluded=(*case.excluded, *values))))
        found.extend(branch.with_case(denied) for denied in _denied_plain(case, place))
        found.extend(self._deny_properties(branch, place))
        return [known for known in found if known.case.types]

    def _deny_combined(self, branch: _Branch, place: Place, trail: frozenset[Literal]) -> Iterator[_Branch]:
        words = place.keywords
        for index in range(len(words.get("allOf", ()))):
            yield branch.plus([self.literal(place, "allOf", index, positive=False)], trail)
        if "anyOf" in words:
            parts = range(len(words["anyOf"]))
            yield branch.plus([self.literal(place, "anyOf", index, positive=False) for index in parts], trail)
        if "not" in words:
            yield branch.plus([self.literal(place, "not")], trail)
        if "oneOf" in words:
            literals = [self.literal(place, "oneOf", index) for index in range(len(words["oneOf"]))]
            yield branch.plus([literal.negated for literal in literals], trail)
            for index, literal in enumerate(literals):
                for other in literals[:index]:
                    yield branch.plus([literal, other], trail)
        if "if" in words:
            for word, positive in (("then", True), ("else", False)):
                if word in words:
                    condition = self.literal(place, "if", positive=positive)
                    yield branch.plus([condition, self.literal(place, word, positive=False)], trail)

    def _deny_properties(self, branch: _Branch, place: Place) -> Iterator[_Branch]:
        case = branch.case.typed(_OBJECT)
        if not case.types:
            return
        for key in place.keywords.get("properties", {}):
            literal = self.literal(place, "properties", key, positive=False)
            yield branch.with_case(case.with_facts(required=(*case.required, key), parts=(*case.parts, (key, literal))))


def _both(known: Case, case: Case) -> Case:
    """As far as it takes to see that nothing is of both."""
    return case.with_facts(
        types=known.types & case.types,
        objects=(*known.objects, *case.objects),
        required=(*known.required, *case.required),
        parts=(*known.parts, *case.parts),
    )


def required_keys(case: Case) -> list[str]:
    """The properties that an object of a case must have, in the order of the schemas."""
    keys = [key for place in case.objects for key in place.keywords.get("required", ())]
    return list(dict.fromkeys((*keys, *case.required)))


def _with_plain_facts(case: Case, place: Place) -> Case:
    words = place.keywords
    if "type" in words:
        case = case.typed(types_named(words["type"]))
    if case.types & _NUMBERS:
        case = _with_bounds(case, words)
    if "string" in case.types:
        languages = tuple((language, True) for language in string_languages(place))
        length = case.length.within(int(words.get("minLength", 0)), _count(words, "maxLength"))
        case = case.with_facts(languages=(*case.languages, *languages), length=length)
    if "array" in case.types:
        case = case.with_facts(items=case.items.within(int(words.get("minItems", 0)), _count(words, "maxItems")))
        if any(word in words for word in _ARRAY_WORDS):
            case = case.with_facts(arrays=(*case.arrays, place))
    if "object" in case.types:
        keys = case.keys.within(int(words.get("minProperties", 0)), _count(words, "maxProperties"))
        case = case.with_facts(keys=keys)
        if any(word in words for word in _OBJECT_WORDS):
            case = case.with_facts(objects=(*case.objects, place))
    return case


def _count(words: Mapping[str, Any], name: str) -> int | None:
    return int(words[name]) if name in words else None


def _with_bounds(case: Case, words: Mapping[str, Any]) -> Case:
    low, high = _bounds(words)
    steps = (Decimal(words["multipleOf"]),) if "multipleOf" in words else ()
    return case.with_facts(low=(*case.low, *low), high=(*case.high, *high), multiples=(*case.multiples, *steps))


def _bounds(words: Mapping[str, Any]) -> tuple[list[Bound], list[Bound]]:
    """Of both spellings: numbers (draft 6 and later), and flags beside the bound (draft 4)."""
    found: tuple[list[Bound], list[Bound]] = ([], [])
    for bounds, name, strict_name in (
        (found[0], "minimum", "exclusiveMinimum"),
        (found[1], "maximum", "exclusiveMaximum"),
    ):
        limit, strict = words.get(name), words.get(strict_name)
        if limit is not None:
            bounds.append(Bound(Decimal(limit), strict=strict is True))
        if strict is not None and not isinstance(strict, bool):
            bounds.append(Bound(Decimal(strict), strict=True))
    return found


def _denied_plain(case: Case, place: Place) -> Iterator[Case]:
    """One case for each keyword of numbers, strings, arrays and objects that a value may fail."""
    words = place.keywords
    number, string = case.typed(_NUMBERS), case.typed(_STRING)
    array, obj = case.typed(_ARRAY), case.typed(_OBJECT)
    low, high = _bounds(words)
    for bound in low:
        yield number.with_facts(high=(*case.high, Bound(bound.value, strict=not bound.strict)))
    for bound in high:
        yield number.with_facts(low=(*case.low, Bound(bound.value, strict=not bound.strict)))
    if string.types:
        for language in string_languages(place):
            yield string.with_facts(languages=(*case.languages, (language, False)))
    for known, fact, least, most in (
        (string, "length", "minLength", "maxLength"),
        (array, "items", "minItems", "maxItems"),
        (obj, "keys", "minProperties", "maxProperties"),
    ):
        size: Size = getattr(case, fact)
        if words.get(least, 0) > 0:
            yield known.with_facts(**{fact: size.within(0, int(words[least]) - 1)})
        if most in words:
            yield known.with_facts(**{fact: size.within(int(words[most]) + 1)})
    for key in words.get("required", ()):
        yield obj.with_facts(absent=case.absent | {key})
    _refuse_denial(number, place, ("multipleOf",))
    _refuse_denial(array, place, _ARRAY_WORDS)
    dependent = ("dependencies", "dependentRequired", "dependentSchemas")
    others = tuple(word for word in _OBJECT_WORDS if word not in {"properties", "required"})
    _refuse_denial(obj, place, (*others, *dependent))


def _refuse_denial(case: Case, place: Place, words: Iterable[str]) -> None:
    """What a value could fail, but no grammar says so."""
    if case.types:
        for word in words:
            if word in place.keywords and not _holds_of_all(word, place.keywords[word]):
                raise SchemaError(place.where(word), "that it does not hold (not, oneOf, if) cannot be enforced")


def _holds_of_all(word: str, value: Any) -> bool:
    if word == "uniqueItems":
        return not value
    return word != "contains" and (value is True or value == {})
