"""Only `make test-rehearse` collects what is in here: it needs torch's CUDA build."""

import os
from pathlib import Path

import pytest

if "SHARDSCALE_TEST_REHEARSE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, from where processes find the launcher all the same."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
