"""How a run can end, and the one exception that means "the user can fix this"."""

import enum


class ExitCode(enum.IntEnum):
    """Process exit codes (torchrun turns every failure into 1; our own torchrun does not)."""

    DONE = 0
    REFUSED = 2
    OUT_OF_MEMORY = 3
    FAILED = 4
    PREEMPTED = 5


class UserError(Exception):
    """Bad input. The message is one sentence that names the value and the fix."""


class Failure(Exception):
    """The run cannot go on. The message is one sentence that says why, and what to do."""


class NotInstalled(UserError):
    """Choices that go together, but need a package that is not on this machine."""
