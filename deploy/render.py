"""Prints a filled template: `python -m deploy.render systemd --set COMMAND=... --set ARGS=...`.

How templates are filled is in `api.units`; `paceline service install` fills and installs them by itself.
"""

from typing import Annotated

import typer

from api.units import TEMPLATES, RenderError, fill


def _assignments(pairs: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise RenderError(f"--set wants NAME=VALUE, not {pair!r}")
        if name in given:
            raise RenderError(f"{name} is set twice")
        given[name] = value
    return given


def main(
    target: Annotated[str, typer.Argument(help=f"What to render: {', '.join(TEMPLATES)}.")],
    pairs: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE")] = None,
) -> None:
    """Print a service file with its placeholders filled."""
    try:
        if target not in TEMPLATES:
            raise RenderError(f"no template {target!r}; there is {', '.join(TEMPLATES)}")
        text = fill(TEMPLATES[target], _assignments(pairs or []))
    except RenderError as error:
        typer.echo(f"render: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(text, nl=False)


if __name__ == "__main__":
    typer.run(main)
