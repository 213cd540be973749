"""A few kills at random moments; ``python tests/kills.py --tries 200`` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import JOBS, kill_at_random

TRIES = {"populate": 2, "build": 5, "tune": 5, "gc": 5}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_nothing_is_lost_when_processes_are_killed(name: str, tmp_path: Path) -> None:
    killed, lost = kill_at_random(name, tmp_path, TRIES[name], seed=1)
    assert killed > 0
    assert not lost, lost
