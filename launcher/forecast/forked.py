"""Work in forked processes, which import nothing again."""

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from launcher.util.processes import die_with, usable_cores
from launcher.util.startup import deaf_children

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

_LONGEST_S = 10.0
"""For a backward of one number, on a machine that has other work."""
_FORK = multiprocessing.get_context("fork")
_done: "Synchronized[int]"
"""In a worker: how often all workers have called `count_one`."""
_Result = TypeVar("_Result")


def in_workers(
    function: Callable[..., _Result],
    tasks: Sequence[Sequence[object]],
    show: Callable[[int], object] = lambda done: None,
) -> list[_Result]:
    """Call a function with the arguments of each task, on all cores; results in their order.

    Tasks that record traces are done here, one by one, where a fork cannot: autograd has threads
    for GPUs once it has run in a process that sees some, as a notebook's, and a fork has none.

    Args:
        show: called now and then with the number of calls of `count_one`.
    """
    done = _FORK.Value("i", 0)
    if not _forks_run_backward():
        _count_in(done)
        results = []
        for task in tasks:
            show(done.value)
            results.append(function(*task))
        return results
    with contextlib.ExitStack() as stack:
        with deaf_children():  # a Ctrl-C that has come meanwhile arrives at its end
            begun = (done, os.getpid())
            workers = min(len(tasks), usable_cores())
            pool = stack.enter_context(_FORK.Pool(workers, _start_worker, begun))
        result = pool.starmap_async(function, tasks, chunksize=1)
        while not result.ready():
            show(done.value)
            result.wait(0.2)
    return result.get()


def count_one() -> None:
    """Count something as done, for who shows progress."""
    with _done.get_lock():
        _done.value += 1


def _start_worker(done: "Synchronized[int]", parent: int) -> None:
    _count_in(done)
    torch.set_num_threads(1)
    gc.disable()  # short-lived worker with millions of live events: GC passes would dominate
    die_with(parent)


def _count_in(done: "Synchronized[int]") -> None:
    global _done
    _done = done


def _forks_run_backward() -> bool:
    """Return whether a forked process can run a backward: torch tells by an error there alone."""
    with deaf_children():
        child = _FORK.Process(target=_run_backward)
        child.start()
    child.join(_LONGEST_S)
    if child.exitcode is None:  # another thread had a lock of torch's when this one forked
        child.kill()
    return child.exitcode == 0


def _run_backward() -> None:
    code = 1
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, requires_grad=True).sum().backward()
        code = 0
    os._exit(code)
