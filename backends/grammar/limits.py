"""How much a constraint may cost before it is refused."""

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Each with why it has its value."""

    seconds: float = 10.0
    """For one constraint from its arrival on, waiting until somebody is free to vet it included: ten times what the
    largest schemas in the wild take, and less than clients wait for a first token.
    """
    start_seconds: float = 60.0
    """For a vetting process to come up, beside that: it reads its imports from a disk that may be slow."""
    mask_seconds: float = 1.0
    """Of processor time for one token of a text that is tried: a hundred times what schemas in the wild take."""
    waiting: int = 64
    """Constraints that may wait for somebody to vet them; more of them are asked to come again."""
    text_bytes: int = 256 * 1024
    """Of a constraint: schemas of whole interfaces have 100 KiB; reading four times as much would hold the GIL of the
    server for more than a token's time.
    """
    depth: int = 80
    """Of brackets in JSON: real schemas have 40 at most, and every level is a level of recursion."""
    memory_bytes: int = 1024 * 1024 * 1024
    """That one vetting process may have above what it starts with; it is killed for more (Linux only)."""
    processes: int = 2
    """That vet at the same time; each takes 100 MB while it is up."""
    cache_bytes: int = 256 * 1024 * 1024
    """Of compiled grammars that are kept: a thousand of ordinary schemas for a vocabulary of 50,000."""
