"""A recorded micro-batch against the same operator by operator. Skipped without a GPU."""

from pathlib import Path

import pytest
import torch
from test_gpu import losses, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize(
    "flags",
    [
        ["--precision", "fp32"],
        ["--precision", "bf16"],
        ["--precision", "bf16-pure"],
        ["--precision", "bf16", "--global-batch", "24"],
        ["--precision", "bf16", "--optimizer", "adamw8bit"],
    ],
    ids=" ".join,
)
def test_a_replayed_run_is_the_same_run(tmp_path: Path, flags: list[str]) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text(Path(pytest.__file__).read_text() * 20)
    runs = {
        graphs: losses(train(text, tmp_path / graphs, *flags, "--cuda-graphs", graphs))
        for graphs in ("off", "on")
    }
    assert runs["on"] == pytest.approx(runs["off"], rel=1e-5)
