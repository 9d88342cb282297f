"""Looks at what `paceline serve` would need on this machine: BLAS, device, memory, model, grammar engine, port, socket.

Each look is by itself, and none may raise. Changes nothing.
"""

import http.client
import json
import os
import stat
from collections.abc import Callable, Container, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from api.progress import megabytes
from api.sockets import BindError, bind_tcp, is_answered
from backends.mlx.runtime import BlasChoice, describe_device, load_blas, probe_blas

_ROOM_FACTOR = 1.5
"""Weights need this much of their size: they may be held in a wider type for a moment, and lanes come on top."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    what: str
    text: str
    trouble: bool = False


def examine(
    *,
    model: str,
    home: Path,
    host: str,
    port: int,
    uds: Path | None,
    blas: BlasChoice,
    draft_model: str | None = None,
) -> Sequence[Finding]:
    """All findings, in the order in which serving needs them."""
    names = {model, draft_model or model}
    looks: list[tuple[str, Callable[[], Finding]]] = [
        ("blas", lambda: look_at_blas(blas)),
        ("device", look_at_device),
        ("memory", lambda: look_at_memory(names, home)),
        ("model", lambda: look_at_model(model, home)),
        *([] if draft_model is None else [("drafter", lambda: look_at_drafter(draft_model, model, home))]),
        ("grammar", look_at_grammar),
        ("port", lambda: look_at_port(host, port)),
    ]
    if uds is not None:
        looks.append(("socket", lambda: look_at_socket(uds)))
    return [_guarded(what, look) for what, look in looks]


def _guarded(what: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:  # the named boundary of one look: what it cannot do is what it has found
        return Finding(what, f"{type(error).__name__}: {error}", trouble=True)


def look_at_blas(choice: BlasChoice) -> Finding:
    """Which BLAS MLX would use, and how fast a product is with it."""
    blas = load_blas(choice)
    probe = probe_blas()
    text = f"{blas.name}, {probe.gflops:.0f} GFLOP/s"
    if blas.problem is not None:
        return Finding("blas", f"{text}: {blas.problem}", trouble=True)
    return Finding("blas", text, trouble=blas.name == "reference" and choice != "reference")


def look_at_device() -> Finding:
    """What MLX computes on."""
    device = describe_device()
    return Finding("device", f"{device.kind}: {device.name}")


def look_at_memory(models: Container[str], home: Path) -> Finding:
    """Whether the machine can hold the models."""
    from backends.mlx.pull import list_models

    memory = describe_device().memory_bytes
    size = sum(one.bytes for one in list_models(home) if one.name in models)
    return Finding("memory", f"{megabytes(memory)} in all", trouble=size * _ROOM_FACTOR > memory)


def look_at_model(model: str, home: Path) -> Finding:
    """Where it is, or whether it could be had."""
    from backends.mlx.pull import CATALOGUE, is_complete, list_models

    for one in list_models(home):
        if one.name == model:
            return Finding("model", f"{model} in {one.folder} ({one.dtype}, {megabytes(one.bytes)})")
    folder = Path(model).expanduser()
    if folder.is_dir():
        whole = is_complete(folder)
        return Finding("model", f"{folder}" if whole else f"{folder} holds no whole model", trouble=not whole)
    if any(known.name == model for known in CATALOGUE):
        return Finding("model", f"{model} is not here yet; serve pulls it")
    if model.count("/") == 1:
        return Finding("model", f"{model} would be taken from the hub")
    return Finding("model", f"{model} is not installed, no folder, and no hub repository", trouble=True)


def look_at_drafter(draft_model: str, model: str, home: Path) -> Finding:
    """Where the draft model is; and if both are here, whether they have one vocabulary."""
    from backends.mlx.load import LoadError, refuse_other_tokens

    own, target = _folder_of(draft_model, home), _folder_of(model, home)
    found = look_at_model(draft_model, home)
    if own is not None and target is not None and not found.trouble and not own.samefile(target):
        try:
            refuse_other_tokens(draft_model, own, model, target)
        except LoadError as refused:
            return Finding("drafter", str(refused), trouble=True)
    return Finding("drafter", found.text, found.trouble)


def _folder_of(model: str, home: Path) -> Path | None:
    """Where an installed model lies, or one that is named by its folder."""
    from backends.mlx.pull import list_models

    installed = next((one.folder for one in list_models(home) if one.name == model), None)
    folder = Path(model).expanduser()
    return installed or (folder if folder.is_dir() else None)


def look_at_grammar() -> Finding:
    """Whether constrained output can be had, and by which release."""
    from backends.grammar.xgrammar_core import CoreCompiler

    CoreCompiler([b"a", b""], [1]).grammar('root ::= "a"').matcher()
    return Finding("grammar", f"xgrammar {version('xgrammar')}")


def look_at_port(host: str, port: int) -> Finding:
    """Whether it is free, or ours already."""
    try:
        bind_tcp(host, port).close()
    except BindError as error:
        status = _health(host, port)
        if status is None:
            return Finding("port", str(error), trouble=True)
        return Finding("port", f"a Paceline server answers there already: {status}", trouble=status != "ready")
    return Finding("port", f"{host} port {port} is free")


def look_at_socket(path: Path) -> Finding:
    """Whether the file is free to be made."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        return Finding("socket", f"cannot write in {path.parent}", trouble=True)
    if not os.path.lexists(path):
        return Finding("socket", f"{path} is free")
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return Finding("socket", f"{path} is a file, no socket", trouble=True)
    if is_answered(path):
        return Finding("socket", f"a server listens on {path} already")
    return Finding("socket", f"{path} was left by a dead server; serve replaces it")


def _health(host: str, port: int) -> str | None:
    """What `/health` says there; None if it is no Paceline."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/health")
        told = json.loads(connection.getresponse().read(4096))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return str(told["status"]) if isinstance(told, dict) and "status" in told else None
