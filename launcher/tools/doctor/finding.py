"""Findings, and running checks so that none of them stops or stalls the others."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

State = Literal["ok", "warn", "fail", "n/a"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: a fact, what will not work because of it, and how to fix that.

    `ok`: works. `warn`: works less well, or only in another way. `fail`: a main feature will not
    work. `n/a`: does not apply to this machine.
    """

    state: State
    found: str
    consequence: str | None = None
    fix: str | None = None


Check = Callable[[], Finding]


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
fail = partial(Finding, "fail")
not_applicable = partial(Finding, "n/a")


def run_checks(checks: Mapping[str, Check], *, within_s: float) -> dict[str, Finding]:
    """Run all checks within `within_s` seconds; returns findings in the order of `checks`.

    A broken driver or network file system can block a call for ever, so each check runs in a
    thread that is abandoned if it does not answer.
    """
    findings: dict[str, Finding] = {}

    def examine(name: str, check: Check) -> None:
        try:
            findings[name] = check()
        except Exception as error:
            findings[name] = warn(
                f"the check itself failed: {type(error).__name__}: {error}",
                "unknown state",
                "please report it as a bug of shardscale doctor",
            )

    deadline_s = time.monotonic() + within_s
    threads = [
        threading.Thread(target=examine, args=item, daemon=True, name=item[0])
        for item in checks.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    silent = warn(
        f"no answer within {within_s:.0f} s",
        "training may hang here as well",
        "try again on an idle machine, then check the driver or the file system",
    )
    return {name: findings.get(name, silent) for name in checks}
