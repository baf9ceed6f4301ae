"""Shared by all tests: a corpus cache of the session's own, and one thread per process."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Ranks that share two cores with each other only get slower by more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Nor does it help to start a pool of processes for the few kernels of a test.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Ignored in what a script starts with `&`, and in its children: they could not be sent one.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempt what is imported by now from garbage collection, as a run does; search what tests
    make, most of which is freed without, less often."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session", autouse=True)
def _corpus_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is written into the user's own cache, unless a warm one is asked for; workers of
    pytest-xdist share theirs, as runs on one machine do."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ.setdefault("SHARDSCALE_CACHE", str(shared / "corpora"))


@pytest.fixture(autouse=True)
def _compiled_apart() -> Iterator[None]:
    """Forget what a test has compiled: for a second shape torch would compile it for any shape,
    which takes a minute and not seconds, and after eight variants not at all."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
