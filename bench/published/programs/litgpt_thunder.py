"""Start LitGPT's extensions/thunder/pretrain.py without Thunder, on blocks of one token.

python litgpt_thunder.py SOURCE DEVICES STRATEGY GLOBAL_BATCH OUT
"""

import sys
from pathlib import Path
from typing import Any

source, devices, strategy, global_batch, out = sys.argv[1:]
sys.path[:0] = [source, f"{source}/extensions/thunder"]

import pretrain  # type: ignore[import-not-found]  # noqa: E402
import torch  # noqa: E402
from litgpt.args import TrainArgs  # type: ignore[import-not-found]  # noqa: E402
from litgpt.data import DataModule  # type: ignore[import-not-found]  # noqa: E402


class Blocks(DataModule):  # type: ignore[misc]
    """Blocks as TinyStories has them: a sequence and the token after it."""

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = 0) -> None:
        self.batch_size, self.length = batch_size, max_seq_length + 1

    def train_dataloader(self) -> Any:
        blocks = torch.full((64 * self.batch_size, self.length), 5)
        rows: Any = list(blocks)
        return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader


pretrain.setup(
    model_name="tiny-llama-1.1b",
    out_dir=Path(out),
    data=Blocks(),
    train=TrainArgs(
        save_interval=1000,
        log_interval=1,
        global_batch_size=int(global_batch),
        micro_batch_size=4,
        max_tokens=int(3e12),
        max_norm=1.0,
        min_lr=4e-5,
        lr_warmup_steps=2000,
        tie_embeddings=False,
    ),
    devices=int(devices),
    logger_name="csv",
    compiler=None,
    strategy=strategy,
)
