"""A rank that is killed while the ranks save together."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_cases import BEFORE, BY_NAME
from harness import run_ranks, write_text

from launcher.checkpoint import Checkpointer
from launcher.config.arguments import parse_run_config
from launcher.model.gpt import GPT
from launcher.strategies.native import NativeEngine


@pytest.mark.parametrize("name", ["fp32-zero2-x2", "lora-fsdp-x2"])
def test_the_checkpoint_before_is_intact(name: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    done = run_ranks((2, "checkpoint_rank", "die", text, tmp_path, name))
    assert done.returncode != 0
    results = (tmp_path / "results-0.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["from"] for line in results] == [None], done.stderr
    # What was being written is there, but under no name that anybody would take.
    (unfinished,) = (tmp_path / name).glob(f".saving-step-{2 * BEFORE:08d}-*")
    assert (unfinished / "rank-00001.safetensors").exists()
    assert not (unfinished / "index.json").exists()

    module = GPT(parse_run_config(BY_NAME[name].arguments(str(text))).model.build())
    engine = NativeEngine(
        module,
        torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], fused=True),
        accumulation=1,
        clip=0.0,
        device=torch.device("cpu"),
    )
    loaded, passed_over = Checkpointer(tmp_path / name).load(tmp_path / name, engine)
    assert loaded.step == BEFORE
    assert loaded.world_size == 2
    assert passed_over == []
