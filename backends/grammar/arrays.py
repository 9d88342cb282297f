"""The arrays of a case as rules: items one by one, then any number of further ones, within the bounds of their size."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from backends.grammar.automaton import TooLargeError
from backends.grammar.cases import Case, Cases, Conjunction, Literal, Size
from backends.grammar.document import Document, Place, SchemaError
from backends.grammar.ebnf import COMMA, Part, Ref, Rules, Times, literal
from backends.grammar.instance import equal, item_keywords, item_place, spellings, type_of

_MAX_UNIQUE = 6
"""Values that the items of an array without repetition may have: there is a rule for every set of them."""
_MAX_LEAST = 1_000_000


class ArrayRules:
    """Adds the rules of arrays to a grammar."""

    def __init__(self, rules: Rules, document: Document, cases: Cases, value: Callable[[Conjunction], Ref]) -> None:
        """`value` is the rule of the values that satisfy some subschemas."""
        self._rules = rules
        self._document = document
        self._cases = cases
        self._value = value

    def array(self, case: Case) -> list[Part]:
        """The arrays of a case. Raises SchemaError, TooLargeError."""
        if not case.items.possible:
            return [self._rules.never()]
        for place in case.arrays:
            _refuse_contains(place)
        listed = max((_listed_items(place) for place in case.arrays), default=0)
        unique = [place for place in case.arrays if place.keywords.get("uniqueItems")]
        if unique and case.items.most not in {0, 1}:
            return self._unique_array(case, listed, unique[0].where("uniqueItems"))
        items = [self._value(self._item(case, index)) for index in range(listed)]
        return ['"["', self._items_from(0, items, self._value(self._item(case, listed)), case.items)]

    def _item(self, case: Case, index: int) -> Conjunction:
        places = [item_place(self._document, place, index) for place in case.arrays]
        return frozenset(Literal(place.pointer) for place in places if place is not None)

    def _items_from(self, index: int, items: Sequence[Ref], rest: Ref, size: Size) -> Ref:
        """What follows behind so many items, up to the end of the array."""
        name = self._rules.new("a")
        if index >= size.least:
            self._rules.add(name, [['"]"']])
        if size.most is not None and index >= size.most:
            return Ref(name)
        comma = [literal(COMMA)] if index else []
        if index < len(items):
            return self._rules.add(name, [[*comma, items[index], self._items_from(index + 1, items, rest, size)]])
        least = max(0, size.least - index)
        most = None if size.most is None else size.most - index
        if index == 0:  # the first one has no comma before it
            least, most = max(0, least - 1), None if most is None else most - 1
            following = self._repeated([literal(COMMA), rest], least, most)
            self._rules.add(name, [[rest, *following, '"]"']])
            return self._rules.add(name, [[rest, '"]"']] if least == 0 else [])
        return self._rules.add(name, [[*self._repeated([literal(COMMA), rest], max(1, least), most), '"]"']])

    def _repeated(self, parts: Sequence[Part], least: int, most: int | None) -> list[Part]:
        if most == 0:
            return []
        if least > _MAX_LEAST:
            raise TooLargeError(f"an array of more than {_MAX_LEAST} items at least")
        return [Times(self._rules.add(self._rules.new("r"), [parts]).name, least, most)]

    def _unique_array(self, case: Case, listed: int, where: str) -> list[Part]:
        """Of a few values: a rule for each set of those that are already there."""
        values = self._few_values(self._item(case, 0)) if listed == 0 else None
        if values is None:
            raise SchemaError(where, f"it is supported for items that have at most {_MAX_UNIQUE} possible values")
        names = {
            used: self._rules.new("u")
            for count in range(len(values) + 1)
            for used in combinations(range(len(values)), count)
        }
        for used, name in names.items():
            if case.items.within(len(used), len(used)).possible and len(used) >= case.items.least:
                self._rules.add(name, [['"]"']])
            if case.items.most is not None and len(used) >= case.items.most:
                continue
            for index, value in enumerate(values):
                if index not in used:
                    item: list[Part] = [literal((COMMA if used else "") + text) for text in spellings(value)]
                    following = Ref(names[tuple(sorted((*used, index)))])
                    self._rules.add(name, [[spelling, following] for spelling in item])
        return ['"["', Ref(names[()])]

    def _few_values(self, conjunction: Conjunction) -> list[Any] | None:
        found: list[Any] = []
        for case in self._cases.of(conjunction):
            values = case.values if case.values is not None else _values_of_types(case)
            if values is None:
                return None
            found.extend(value for value in values if not any(equal(value, other) for other in found))
        return found if len(found) <= _MAX_UNIQUE else None


def _refuse_contains(place: Place) -> None:
    words = place.keywords
    if "contains" in words and (words.get("minContains") != 0 or "maxContains" in words):
        raise SchemaError(place.where("contains"), "it is not supported")


def _listed_items(place: Place) -> int:
    prefix, _ = item_keywords(place)
    return 0 if prefix is None else len(place.keywords[prefix])


def _values_of_types(case: Case) -> list[Any] | None:
    """The values of a case without numbers, strings, arrays and objects; None if it has any of those."""
    if not case.types <= {"null", "boolean"}:
        return None
    values = [value for value in (None, True, False) if type_of(value) in case.types]
    return [value for value in values if not any(equal(value, other) for other in case.excluded)]
