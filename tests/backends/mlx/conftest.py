"""What tests of lanes share; and after a run over all architectures a row for each of them, with what its layers cache,
or why it is refused.
"""

from collections.abc import Iterator

import pytest

from tests.backends.mlx.serving import Agreement, one_blas_thread


@pytest.fixture(scope="module")
def calm() -> Iterator[None]:
    """One BLAS thread: several wait for each other where other work keeps the cores."""
    with one_blas_thread():
        yield


@pytest.fixture(scope="module")
def agreement() -> Iterator[Agreement]:
    """Counts a module's requests, and fails at its end if too many were near-ties."""
    counted = Agreement()
    yield counted
    counted.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "models" not in config.getoption("markexpr").replace("not models", "", 1):
        return
    rows: dict[str, str] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if "test_architectures.py" not in report.nodeid or "[" not in report.nodeid:
                continue
            name = report.nodeid.partition("[")[2].rstrip("]").rpartition("-0-")[2].rpartition("-5-")[2]
            said = dict(report.user_properties)
            if outcome == "failed":
                rows[name] = "fail"
            elif "refused" in said:
                rows[name] = f"refused: {said['refused']}"
            elif "families" in said:
                rows.setdefault(name, f"pass: {said['families']}")
    terminalreporter.section("architectures")
    for name, verdict in sorted(rows.items()):
        terminalreporter.write_line(f"{name:24} {verdict}")
    passed = sum(verdict.startswith("pass") for verdict in rows.values())
    terminalreporter.write_line(f"{passed} of {len(rows)} are served")
