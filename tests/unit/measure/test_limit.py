"""Which errors mean that memory ran out."""

import resource
from types import SimpleNamespace

import psutil
import pytest
import torch

from launcher.measure.limit import is_out_of_memory, lift_limit, limit_memory, requested_bytes
from launcher.measure.memory import peak_rss_bytes
from launcher.util.errors import UserError


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("could not create a primitive"), True),  # what oneDNN says under a limit
        (RuntimeError("could not create a primitive descriptor for a matmul primitive"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("not enough memory"), False),
        (
            RuntimeError(
                "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
                '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1392, please report a bug'
            ),
            True,
        ),
    ],
)
def test_what_means_that_memory_ran_out(error: Exception, ran_out: bool) -> None:
    assert is_out_of_memory(error) == ran_out


def test_a_thread_that_cannot_start_means_it_under_a_limit() -> None:
    error = RuntimeError("Resource temporarily unavailable")
    assert not is_out_of_memory(error)
    limit_memory("1GiB", torch.device("cpu"))
    try:
        assert is_out_of_memory(error)
    finally:
        lift_limit(torch.device("cpu"))


def test_a_limit_above_the_hard_one_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**40, 2**40))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    limit_memory("1GiB", torch.device("cpu"))
    assert [hard for _, hard in limits] == [2**40]
    with pytest.raises(UserError, match=r"--memory-limit 2048.00GiB .* \(ulimit -Hd\): give less"):
        limit_memory("2TiB", torch.device("cpu"))


def test_what_was_asked_for_is_read_from_the_allocators_message() -> None:
    asked = RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")
    assert requested_bytes(asked) == 3 * 2**29
    assert requested_bytes(MemoryError()) is None


def test_the_peak_is_not_that_of_the_program_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux hands ru_maxrss on to what a process executes, such as a run after its search."""
    most = psutil.virtual_memory().total
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=most))
    assert psutil.Process().memory_info().rss // 2 < peak_rss_bytes() < most
