"""Values that a rehearsed program has read, as the report lists them."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.tools import watch
from launcher.tools.rehearse.null_gpu import INSIDE
from launcher.tools.rehearse.values import value_lines


def read(number: int, answer: object, library: str | None) -> dict[str, Any]:
    place = {"place": f"/train.py:{number}", "library": library, "call": "item", "times": 1200}
    return {**place, "answer": answer}


def test_many_numbers_that_libraries_log_are_counted() -> None:
    logs = [read(3, 1.0, f"/trl/trainer/grpo_trainer.py:{line}") for line in range(5)]
    others = [
        *(read(1, 1.0, None), read(2, True, "/transformers/masking_utils.py:7")),
        {**read(0, "all 8 to 10 elements", None), "place": "backward:0", "call": "nonzero"},
    ]
    rank = SimpleNamespace(events=lambda name: [*others, *logs])
    stage: Any = SimpleNamespace(ranks=[rank])
    _, head, *rows, last = value_lines(stage)
    assert head.split() == ["line", "in", "call", "times", "answer"]
    assert [" ".join(row.split()) for row in rows] == [
        "/train.py:1 item 1,200 1.0",
        "/train.py:2 transformers/masking_utils.py:7 item 1,200 True",
        "in backward nonzero 1,200 all 8 to 10 elements",
    ]
    assert last == "    5 more lines of libraries read numbers (--json lists them)"


def test_a_few_are_listed() -> None:
    rank = SimpleNamespace(events=lambda name: [read(3, 1.0, "/transformers/trainer.py:2249")])
    stage: Any = SimpleNamespace(ranks=[rank])
    assert list(value_lines(stage))[-1].split()[1] == "transformers/trainer.py:2249"


def test_fake_tensors_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run's own plan has them, of a decoder of transformers."""
    for folder in (watch.INSIDE, INSIDE):
        monkeypatch.syspath_prepend(str(folder))
    follow = import_module("shardscale_rehearsal.follow")

    def repeated(row: Tensor) -> Tensor:
        return row.expand(2, -1)

    with FakeTensorMode():
        assert follow.call_followed(repeated, torch.zeros(1, 3)).shape == (2, 3)
