"""The objects of a case as rules: named properties in their order, then those only required, then further ones."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from backends.grammar.automaton import EVERYTHING, Automaton, literals
from backends.grammar.cases import Case, Cases, Conjunction, Literal, required_keys
from backends.grammar.document import Document, Place, SchemaError
from backends.grammar.ebnf import COLON, COMMA, Part, Ref, Rules, literal
from backends.grammar.instance import Validator, additional_keyword, property_pattern, written
from backends.grammar.languages import names_language

_MAX_UNORDERED = 4
"""Required properties without a subschema that may come in any order; more of them come in the schema's order."""
_MAX_PATTERNS = 6
"""Patterns of property names in one object: names are told apart by every set of them."""


class _At(NamedTuple):
    """A place in an object."""

    behind: int
    """How many named properties are behind us."""
    open: frozenset[str]
    """Required properties still to come, in any order, once the named ones are behind us."""
    members: int
    """As far as it matters: up to `maxProperties`, else whether there are any."""
    distinct: int
    """Names, up to `minProperties`. A further name may occur twice, but only one beyond the required ones counts."""


class ObjectRules:
    """Adds the rules of one case's objects to a grammar."""

    def __init__(
        self,
        rules: Rules,
        document: Document,
        cases: Cases,
        value: Callable[[Conjunction], Ref],
        case: Case,
    ) -> None:
        """`value` is the rule of the values that satisfy some subschemas."""
        self._rules = rules
        self._document = document
        self._cases = cases
        self._value = value
        self._case = case
        self._required = required_keys(case)
        named = dict.fromkeys(key for place in case.objects for key in place.keywords.get("properties", {}))
        only_required = [key for key in self._required if key not in named]
        ordered = only_required if len(only_required) > _MAX_UNORDERED else []
        self._named = [*named, *ordered]
        self._unordered = frozenset(only_required) - frozenset(ordered)
        self._validator = Validator(document)
        self._names: dict[_At, str] = {}
        self._waiting: list[_At] = []

    def object(self, where: str) -> list[Part]:
        """The objects of the case. Raises SchemaError, TooLargeError."""
        size = self._case.keys
        if not size.possible or any(not self._may_have(key) for key in self._required):
            return [self._rules.never()]
        further = self._further()
        if further is not None and size.least > len(self._required) + 1:
            reason = "beside further properties it is supported for up to one more than are required"
            raise SchemaError(where, f"minProperties: {reason}")
        properties = {key: self._property(key) for key in (*self._named, *self._unordered) if self._may_have(key)}
        start = self._rule(_At(0, self._unordered, 0, 0))
        while self._waiting:
            at = self._waiting.pop()
            self._rules.add(self._names[at], self._alternatives(at, properties, further))
        return ['"{"', start]

    def _may_have(self, key: str) -> bool:
        if key in self._case.absent:
            return False
        places = [place for place in self._case.objects if "propertyNames" in place.keywords]
        return all(self._validator.holds(key, self._document.child(place, "propertyNames")) for place in places)

    def _property(self, key: str) -> list[Part]:
        return [literal(written(key) + COLON), self._value(self._cases.property(self._case, key))]

    def _rule(self, at: _At) -> Ref:
        if at not in self._names:
            self._names[at] = self._rules.new("o")
            self._waiting.append(at)
        return Ref(self._names[at])

    def _alternatives(self, at: _At, properties: dict[str, list[Part]], further: Ref | None) -> Iterator[list[Part]]:
        most = self._case.keys.most
        room = most is None or at.members < most
        comma: list[Part] = [literal(COMMA)] if at.members else []
        if at.behind < len(self._named):
            key = self._named[at.behind]
            if room and key in properties:
                yield [*comma, *properties[key], self._rule(self._counted(at)._replace(behind=at.behind + 1))]
            if key not in self._required:
                yield [self._rule(at._replace(behind=at.behind + 1))]
            return
        if not at.open and at.distinct >= self._case.keys.least:
            yield ['"}"']
        if not room:
            return
        for key in sorted(at.open):
            yield [*comma, *properties[key], self._rule(self._counted(at)._replace(open=at.open - {key}))]
        if further is not None:
            yield [*comma, further, self._rule(self._counted(at))]

    def _counted(self, at: _At) -> _At:
        size = self._case.keys
        members = 1 if size.most is None else at.members + 1
        return at._replace(members=members, distinct=min(at.distinct + 1, size.least))

    # ---- further properties ------------------------------------------------------------------------------------------

    def _further(self) -> Ref | None:
        """A property that is not named: for every set of patterns, the names that match just these."""
        patterns = [
            (place, pattern, property_pattern(place, pattern))
            for place in self._case.objects
            for pattern in place.keywords.get("patternProperties", {})
        ]
        if len(patterns) > _MAX_PATTERNS:
            where = patterns[0][0].where("patternProperties")
            raise SchemaError(where, f"more than {_MAX_PATTERNS} patterns are not supported")
        alternatives = []
        for matches in product((True, False), repeat=len(patterns)):
            matched = [(place, pattern) for (place, pattern, _), match in zip(patterns, matches, strict=True) if match]
            value = self._further_value(matched)
            if value is None:
                continue
            names = self._further_names(
                [(language, match) for (_, _, language), match in zip(patterns, matches, strict=True)]
            )
            if not names.empty:
                alternatives.append([*self._quoted(names), literal(COLON), self._value(value)])
        return self._rules.add(self._rules.new("f"), alternatives) if alternatives else None

    def _further_value(self, matched: list[tuple[Place, str]]) -> Conjunction | None:
        """What the values of such names satisfy; None if there is no such value."""
        found = [self._document.child(place, "patternProperties", pattern) for place, pattern in matched]
        for place in self._case.objects:
            keyword = additional_keyword(place)
            if keyword is not None and not any(place == other for other, _ in matched):
                found.append(self._document.child(place, keyword))
        if any(place.value is False for place in found):
            return None
        return frozenset(Literal(place.pointer) for place in found)

    def _further_names(self, patterns: list[tuple[Automaton, bool]]) -> Automaton:
        taken = {*self._named, *self._unordered, *self._case.absent}
        names = EVERYTHING - literals(taken) if taken else EVERYTHING
        for language, match in patterns:
            names = names & language if match else names - language
        conditions = frozenset(
            Literal(self._document.child(place, "propertyNames").pointer)
            for place in self._case.objects
            if "propertyNames" in place.keywords
        )
        return names & names_language(self._cases, conditions) if conditions else names

    def _quoted(self, names: Automaton) -> list[Part]:
        if names is EVERYTHING:
            return [Ref("string")]
        return ['"\\""', self._rules.add_automaton("k", names, json_string=True, end='"')]
