"""Start and end of a process: Ctrl-C, imports without garbage collection, and lost readers.

During imports there is nothing to tidy up, and an exception may come out as any other: SIGINT ends
the process at once. `interruptible` is for commands that have files or processes to remove.

Imports leave some 300,000 objects behind, which stay. Python's collector would walk over them again
and again as they come in, and now and then while training, with the other ranks waiting
(bench/startup.py).
"""

import atexit
import contextlib
import errno
import gc
import importlib.machinery
import io
import logging
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from launcher.util.errors import ExitCode, UserError, tell

_PATIENCE_S = 5.0
# In torch's order; the first that is set counts, an empty one too.
_ALLOCATOR_VARIABLES = tuple(f"PYTORCH_{name}ALLOC_CONF" for name in ("CUDA_", "HIP_", ""))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection in the block, and exempt all objects created by then from it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def libraries_say(level: str) -> None:
    """Set the log level of torch, DeepSpeed and the Hugging Face libraries: all at `debug`, else
    warnings, or errors."""
    theirs = "warning" if level == "info" else level
    logging.basicConfig(format="%(name)s: %(levelname)s: %(message)s")
    logging.getLogger().setLevel(theirs.upper())
    for variable in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(variable, theirs)
    if level in ("warning", "error"):
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def allocator_variable() -> tuple[str, str] | None:
    """Return (name, value) of the user's setting for torch's CUDA allocator, if any."""
    return next(
        ((name, os.environ[name]) for name in _ALLOCATOR_VARIABLES if name in os.environ), None
    )


def expands_segments() -> bool:
    """Return whether torch's CUDA allocator expands segments in a run; the user's variable wins."""
    variable = allocator_variable()
    if variable is None:
        return True
    _, value = variable
    found = re.findall(r"expandable_segments:(\w+)", re.sub(r"\s", "", value))
    return found[-1:] == ["True"]


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit cleanly when the reader of stdout closes it: `shardscale plan ... | head`.

    On a full disk, exit with one sentence.
    """
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        # rich makes exit code 1 of it.
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        _drop_stdout()
        sys.exit(0)
    except OSError as error:
        # an error with a file's name is not of stdout
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _drop_stdout()
        tell(f"the output cannot be written: {error.strerror}")
        sys.exit(ExitCode.FAILED)


def _drop_stdout() -> None:
    """Drop what is still in its buffer, which the interpreter flushes last."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Outlet(io.FileIO):
    """Standard output or error of a process that outlives its readers.

    What a reader that has gone (`| head`), a full disk (`> log`) or a closed terminal does not take
    is dropped; so is what a reader that is there, but reads no more, has not taken for a while.
    """

    _patience_s = _PATIENCE_S

    def write(self, data: Any) -> int:
        """Write some of the data, or drop it."""
        piece = memoryview(data).cast("B")[: select.PIPE_BUF]  # fits wherever there is any room
        with contextlib.suppress(OSError):
            if select.select([], [self], [], self._patience_s)[1]:
                self._patience_s = _PATIENCE_S
                super().write(piece)
            else:
                self._patience_s = 0.0  # until it reads on
        return len(piece)


def outlive_readers() -> None:
    """Make this process independent of the readers of its output."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed; the next file to be opened would get its number, and its text
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        before = getattr(sys, name)
        if before is getattr(sys, f"__{name}__"):  # it is not captured
            outlet = io.BufferedWriter(_Outlet(number, "w", closefd=False))
            encoding = getattr(before, "encoding", "utf-8")
            text = io.TextIOWrapper(outlet, encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, text)


def require_own_package() -> None:
    """Refuse a folder where `python -m launcher...`, which starts ranks, would find another
    `launcher`.

    Raises:
        UserError: in the working folder, or on PYTHONPATH.
    """
    # `python -m` looks into the working folder first, unless this is set
    here = [] if os.environ.get("PYTHONSAFEPATH") else [""]
    places = [*here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = importlib.machinery.PathFinder.find_spec("launcher", places)
    ours = Path(__file__).parents[1] / "__init__.py"
    # A folder without __init__.py hides nothing, and has no origin.
    if found is not None and found.origin and not os.path.samefile(found.origin, ours):
        raise UserError(
            f"{found.origin} hides shardscale's own package of that name from the ranks: rename "
            "it, or start from another folder"
        )


SCRIPTS = ("shardscale", "memscale", "torchrun")
_STOPPED = "shardscale: stopped by SIGINT\n"


def begin() -> None:
    """Prepare this process if it is one of our commands, not a program that imports us."""
    if not _is_command():
        return
    if hears(signal.SIGINT):
        signal.signal(signal.SIGINT, _end_at_once)
    try:
        os.getcwd()
    except FileNotFoundError:
        tell("the working folder is deleted: cd to another one")
        sys.exit(ExitCode.REFUSED)
    if os.environ.get("COLUMNS", "1").strip("0") == "":  # of which nothing could be shown
        del os.environ["COLUMNS"]


def hears(number: int) -> bool:
    """Return whether a signal is not ignored. Scripts' background jobs ignore SIGINT, nohup's
    SIGHUP, and so do their children."""
    return signal.getsignal(number) is not signal.SIG_IGN


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT into a KeyboardInterrupt within, then end with exit code 130; a second SIGINT
    ends the process at once.

    Raises:
        SystemExit: after a SIGINT, whatever has become of its KeyboardInterrupt on the way.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or not hears(signal.SIGINT):
        yield
        return
    heard = False

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal heard
        heard = True
        signal.signal(signal.SIGINT, _end_at_once)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException:
        if not heard:
            raise
    finally:
        if not heard:
            signal.signal(signal.SIGINT, before)
    if heard:
        _say_stopped()
        raise SystemExit(ExitCode.INTERRUPTED)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import in the block what a command needs once its arguments are valid: `--help` and mistakes
    are answered without torch, in a tenth of the time. SIGINT ends the process at once, as in the
    imports before."""
    before = signal.getsignal(signal.SIGINT)
    # Not in a program that imports us, whose handler is another.
    ours = getattr(before, "__module__", None) == __name__
    if ours:
        signal.signal(signal.SIGINT, _end_at_once)
    try:
        with importing():
            yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Start child processes that ignore a terminal's Ctrl-C: this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:  # one that has come meanwhile arrives now
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_with(code: int) -> NoReturn:
    """End this command as Python does, but for the interpreter's teardown.

    That takes half a second once torch is imported, and libraries take for leaks what `importing`
    has exempted from collection (nanobind, in Triton from torch 2.15 on).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            with contextlib.suppress(OSError):  # its reader has left
                stream.flush()
    os._exit(code)


def _is_command() -> bool:
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # as long as Python looks for the module
        return any(word.partition(".")[0] == "launcher" for word in sys.orig_argv)
    return Path(program).name in SCRIPTS


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    for child in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    _say_stopped()
    os._exit(ExitCode.INTERRUPTED)


def _descendants(process_id: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended, or this is not Linux
        for path in Path(f"/proc/{process_id}/task").glob("*/children"):
            for child in map(int, path.read_text(encoding="ascii").split()):
                yield from _descendants(child)
                yield child


def _say_stopped() -> None:
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(
            OSError
        ):  # not by sys.stderr, which may be in the middle of a line
            os.write(2, _STOPPED.encode())
