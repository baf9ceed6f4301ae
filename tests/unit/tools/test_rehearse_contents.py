"""The table of what a rehearsed program holds at its peak."""

from types import SimpleNamespace
from typing import Any

from launcher.tools.rehearse.report import _contents
from launcher.tools.watch.content import Content, Held


def test_equal_bytes_are_in_the_order_of_their_allocation() -> None:
    names = ["params", "grads", "optimizer", "temporary", "activations", "other"]
    sizes = dict.fromkeys(names, 2**30)
    content = Content(total_bytes=0, phase="first_step/step", by_category=sizes, by_module={})
    stage: Any = SimpleNamespace(held={0: Held(peak=content, end=content)})
    rank: Any = SimpleNamespace(number=0)
    _, *rows = _contents(stage, rank)
    assert [row.split()[0] for row in rows[: len(names)]] == names
