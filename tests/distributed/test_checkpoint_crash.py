"""A rank that is killed while the ranks save together."""

import json
from pathlib import Path

import torch
from harness import HERE, torchrun, write_text

from launcher.checkpoint import Checkpointer
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.native import NativeEngine


def test_the_checkpoint_before_is_intact(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    name = "fp32-zero2-x2"
    done = torchrun(2, HERE / "checkpoint_rank.py", "die", text, tmp_path, name)
    assert done.returncode != 0
    results = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["from"] for line in results] == [None], done.stderr
    # What was being written is there, but under no name that anybody would take.
    (unfinished,) = (tmp_path / name).glob(".saving-step-00000020-*")
    assert (unfinished / "rank-00001.safetensors").exists()
    assert not (unfinished / "index.json").exists()

    config = ModelConfig(vocab_size=261, context=16, layers=1, heads=2, d_model=30)
    module = GPT(config)
    engine = NativeEngine(
        module,
        torch.optim.AdamW(module.parameters(), fused=True),
        accumulation=1,
        clip=0.0,
        device=torch.device("cpu"),
    )
    loaded = Checkpointer(tmp_path / name).load("auto", engine)
    assert loaded is not None
    assert loaded.checkpoint.step == 10
    assert loaded.checkpoint.world_size == 2
    assert loaded.passed_over == ()
