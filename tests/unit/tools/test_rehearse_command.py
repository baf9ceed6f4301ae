"""Ranks that the command of a rehearsed program starts."""

from pathlib import Path

import pytest

from launcher.tools.rehearse.command import ranks_per_node


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc-per-node 8 train.py", 8),
        ("torchrun --nproc_per_node=4 train.py", 4),
        ("torchrun --nproc-per-node gpu train.py", None),
        ("deepspeed --num_gpus 2 train.py", 2),
        ("accelerate launch --num_processes 8 --config_file {config} train.py", 8),
        ("accelerate launch --config_file {config} train.py", 4),
        ("accelerate launch --config_file no-such-file train.py", None),
        ("deepspeed --include localhost:0,2 train.py", 3),
        ("deepspeed --include worker-1 train.py", None),
        ("python train.py", None),
        ("python train.py --nproc 16", None),
        ("python -m package.train --num_gpus 4", None),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py --num_gpus 4", 2),
        ("torchrun -m package.train --num_processes=4", None),
    ],
)
def test_a_launcher_says_how_many(command: str, ranks: int | None, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\n")
    assert ranks_per_node(command.format(config=config).split()) == ranks


@pytest.mark.parametrize("text", ["- 8", "num_processes: many", "num_processes: {", ""])
def test_a_config_that_does_not_say_is_accelerates_to_refuse(text: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert ranks_per_node(["accelerate", "launch", "--config_file", str(config), "a.py"]) is None


def test_accelerates_default_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for ranks in (None, 4):
        command = ["/env/bin/accelerate", "launch", "train.py"]
        assert ranks_per_node(command) == ranks
        assert ranks_per_node(["python", "accelerate.py"]) is None
        (tmp_path / "accelerate").mkdir(exist_ok=True)
        (tmp_path / "accelerate" / "default_config.yaml").write_text("num_processes: 4\n")
