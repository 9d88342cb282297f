"""The string formats of JSON schemas that are enforced, as patterns; which others exist; which are none of theirs."""

from functools import cache

from backends.grammar.automaton import Automaton
from backends.grammar.pattern import matching

_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_YEAR = r"\d{4}"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_DURATION_TIME = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_DURATION = rf"P((\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)({_DURATION_TIME})?|{_DURATION_TIME}|\d+W)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(\.{_LABEL})*"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_HEX = r"[0-9A-Fa-f]{1,4}"
_IPV6_LAST = rf"({_HEX}:{_HEX}|{_IPV4})"
_IPV6 = "|".join(
    (
        rf"({_HEX}:){{6}}{_IPV6_LAST}",
        rf"::({_HEX}:){{5}}{_IPV6_LAST}",
        rf"({_HEX})?::({_HEX}:){{4}}{_IPV6_LAST}",
        *(rf"(({_HEX}:){{0,{before}}}{_HEX})?::({_HEX}:){{{3 - before}}}{_IPV6_LAST}" for before in range(1, 4)),
        rf"(({_HEX}:){{0,4}}{_HEX})?::{_IPV6_LAST}",
        rf"(({_HEX}:){{0,5}}{_HEX})?::{_HEX}",
        rf"(({_HEX}:){{0,6}}{_HEX})?::",
    )
)
_UNIT = r"(%[0-9A-Fa-f]{2}|[A-Za-z0-9._~!$&'()*+,;=-])"
_UNIT_CHARACTERS = r"A-Za-z0-9._~!$&'()*+,;="
_PCHAR = rf"(%[0-9A-Fa-f]{{2}}|[{_UNIT_CHARACTERS}:@-])"
_SEGMENT_NO_COLON = rf"(%[0-9A-Fa-f]{{2}}|[{_UNIT_CHARACTERS}@-])+"
_QUERY = rf"(\?(%[0-9A-Fa-f]{{2}}|[{_UNIT_CHARACTERS}:@/?-])*)?"
_FRAGMENT = rf"(#(%[0-9A-Fa-f]{{2}}|[{_UNIT_CHARACTERS}:@/?-])*)?"
_HOST = rf"(\[(({_IPV6})|v[0-9A-Fa-f]+\.[{_UNIT_CHARACTERS}:-]+)\]|{_UNIT}*)"
_AUTHORITY = rf"((%[0-9A-Fa-f]{{2}}|[{_UNIT_CHARACTERS}:-])*@)?{_HOST}(:\d*)?"
_PATH_ABSOLUTE = rf"/({_PCHAR}+(/{_PCHAR}*)*)?"
_HIERARCHY = rf"(//{_AUTHORITY}(/{_PCHAR}*)*|{_PATH_ABSOLUTE}|{_PCHAR}+(/{_PCHAR}*)*|)"
_RELATIVE = rf"(//{_AUTHORITY}(/{_PCHAR}*)*|{_PATH_ABSOLUTE}|{_SEGMENT_NO_COLON}(/{_PCHAR}*)*|)"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:{_HIERARCHY}{_QUERY}{_FRAGMENT}"
_POINTER = r"(/([^~/]|~[01]|[\n\r\u2028\u2029])*)*"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_ATEXT}(\.{_ATEXT})*@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}-([0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": rf"({_URI}|{_RELATIVE}{_QUERY}{_FRAGMENT})",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d*)(#|{_POINTER})",
}
REFUSED = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex"})
"""Formats of JSON schemas that are not enforced; whatever is named neither here nor above is an annotation of its
author's (JSON Schema 2020-12, validation, 7.2.3).
"""


@cache
def format_language(name: str) -> Automaton | None:
    """The strings of a format; None for one that is not enforced."""
    pattern = _PATTERNS.get(name)
    return None if pattern is None else matching(pattern)
