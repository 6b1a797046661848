"""A Slurm for the tests: in CI it must be there; elsewhere the tests are left out and named, with how to get it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from cluster import Cluster, why_not  # noqa: E402

HERE = Path(__file__).parent
_left_out: list[str] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests out where there is no Slurm, unless this is CI."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.slurm)
    if ours and why_not() and not os.environ.get("TRAIN_LEDGER_CI"):
        _left_out.extend(item.nodeid for item in ours)
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was not run."""
    if _left_out:
        terminalreporter.section(f"{len(_left_out)} tests not run: {why_not()}")
        for name in _left_out:
            terminalreporter.line(f"not run: {name}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts with eight GPUs each."""
    why = why_not()
    assert why is None, why
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    made.start()
    yield made
    made.stop()
