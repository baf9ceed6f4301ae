"""Durations and deadlines are read from clocks that nobody sets."""

import ast

from test_imports import modules

# Where the wall clock is right: time stamps that people or other files' time stamps are set beside.
WALL_CLOCK = ("time.time(", "datetime.now(", "utcnow(")
STAMPS = ("unix_s", "unix_ms", "mtime", "newest", "strftime")


def test_the_wall_clock_is_read_for_time_stamps_only() -> None:
    """Set back by 20 years or forward by 400 days, it ends no run and makes no figure wrong."""
    read = 0
    for name, tree in modules().items():
        if name.startswith("bench."):
            continue  # which measures, and ends no run
        for statement in ast.walk(tree):
            if not isinstance(statement, ast.stmt) or hasattr(statement, "body"):
                test = getattr(statement, "test", None)  # of an `if` or a `while`
                if test is None:
                    continue
                statement = test
            text = ast.unparse(statement)
            if any(clock in text for clock in WALL_CLOCK):
                read += 1
                assert any(stamp in text for stamp in STAMPS), f"{name}: {text}"
    assert read > 4
