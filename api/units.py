"""Fills the service templates of `deploy/`, strictly.

A template holds placeholders, `@NAME@`. A line that starts with `#?NAME ` is optional: it is kept, without that mark,
when NAME is given, and dropped otherwise. A name that the template does not know, and a name that a kept line needs
but nobody gave, are errors. Every value is quoted for the format that it goes into, so a space, a quote or an
ampersand cannot change the meaning of the file. This module knows nothing of Paceline's own options.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from xml.sax.saxutils import escape as xml_text

import msgspec

WORDS = "ARGS"
"""The one placeholder that stands for a list of words; its value is split as a shell would."""

_PLACEHOLDER = re.compile(r"@([A-Z][A-Z_]*)@")
_OPTIONAL = re.compile(r"#\?([A-Z][A-Z_]*) ")


class RenderError(Exception):
    """A value is missing, unknown, or cannot stand in the file."""


class Template(msgspec.Struct, frozen=True):
    """One file to fill, and how its format writes a value (inside the template's own quotes) and a list of words."""

    path: Traversable
    value: Callable[[str], str]
    words: Callable[[list[str]], str] = " ".join


def _specifiers(value: str) -> str:
    """`value` where systemd knows no quotes, its `%` specifiers made literal."""
    return value.replace("%", "%%")


def _systemd_value(value: str) -> str:
    """`value` inside a quoted systemd setting."""
    return _specifiers(value.replace("\\", "\\\\").replace('"', '\\"'))


def _systemd_words(words: list[str]) -> str:
    """Arguments of a command line, where `$` names a variable as well."""
    return " ".join(f'"{_systemd_value(word).replace("$", "$$")}"' for word in words)


def _launchd_words(words: list[str]) -> str:
    return "\n        ".join(f"<string>{xml_text(word)}</string>" for word in words)


def _yaml_value(value: str) -> str:
    """The inside of a quoted YAML scalar: JSON's escapes are YAML's."""
    return msgspec.json.encode(value).decode()[1:-1]


_DEPLOY = files("deploy")
"""Where the templates stand: in a checkout and in a wheel alike."""
TEMPLATES: Mapping[str, Template] = {
    "systemd": Template(_DEPLOY / "systemd" / "paceline.service", _systemd_value, _systemd_words),
    "systemd-socket": Template(_DEPLOY / "systemd" / "paceline.socket", _specifiers),
    "launchd": Template(_DEPLOY / "launchd" / "dev.paceline.plist", xml_text, _launchd_words),
    "prometheus": Template(_DEPLOY / "prometheus" / "prometheus.yml", _yaml_value),
}


def _kept_lines(text: str, given: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """The template's lines that are to be filled, and every name that the template knows."""
    kept: list[str] = []
    known: set[str] = set()
    for line in text.splitlines():
        mark = _OPTIONAL.match(line)
        body = line[mark.end() :] if mark else line
        known.update(_PLACEHOLDER.findall(body))
        if mark is None or mark[1] in given:
            kept.append(body)
        if mark:
            known.add(mark[1])
    return kept, known


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError as error:
        raise RenderError(f"{WORDS}: {error}: {words!r}") from None


def fill(template: Template, given: Mapping[str, str]) -> str:
    """The text of `template` with every placeholder replaced by its value in `given`.

    Raises RenderError when a needed value is missing, a given one is unknown, or a value holds a control character.
    """
    lines, known = _kept_lines(template.path.read_text(encoding="utf-8"), given)
    if unknown := sorted(given.keys() - known):
        raise RenderError(f"{template.path.name} has no placeholder {', '.join(unknown)}; it has {sorted(known)}")
    if missing := sorted({name for line in lines for name in _PLACEHOLDER.findall(line)} - given.keys()):
        raise RenderError(f"{template.path.name} needs a value for {', '.join(missing)}")
    for name, value in given.items():
        if any(ord(character) < 32 or ord(character) == 127 for character in value):
            raise RenderError(f"the value of {name} holds a control character")

    def replacement(found: re.Match[str]) -> str:
        name = found[1]
        return template.words(_split(given[name])) if name == WORDS else template.value(given[name])

    filled = (_PLACEHOLDER.sub(replacement, line).rstrip() for line in lines)
    return "\n".join(filled) + "\n"
