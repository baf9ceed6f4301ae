"""Options of `shardscale generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from launcher.util.errors import UserError
from launcher.util.flags import MOST_ITEMS, require_range

if TYPE_CHECKING:
    from launcher.run.sampling import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Continue a text, or chat. Streams to a terminal, writes JSON lines to a pipe."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    """A run folder (its newest checkpoint is used), one checkpoint, an export, a folder written by
    transformers' save_pretrained, or hf:ORG/NAME, downloaded once."""
    prompt: str | None = None
    """Text to continue; an empty one starts a new text. Without --prompt and --prompts, all of
    standard input is the prompt, its last newline included."""
    prompts: Path | None = None
    """A .jsonl file with a field `prompt` per line."""
    chat: bool = False
    """Answer as a chat model: lines of standard input are turns, or --prompt is the only one. The
    tokenizer's chat template writes the prompt from all turns."""
    system: str | None = None
    """--chat: the system message."""
    max_tokens: int | None = None
    """New tokens per prompt at most (default: 256, or the rest of the model's context)."""
    temperature: float = 0.0
    """0: greedy decoding; above 0: sampling temperature."""
    top_k: int | None = None
    """Sample only among the k most likely tokens."""
    top_p: float | None = None
    """Sample only among the most likely tokens with this total probability (nucleus sampling)."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Stop before this string; may be repeated."""
    seed: int = 0
    """Sampling seed of the first prompt; each further prompt takes the next seed."""
    tokenizer: str | None = None
    """A tokenizer.json, byte or hf:NAME instead of the model's own."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of weights and computation; checkpoints are fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU if there is one."""

    def __post_init__(self) -> None:
        require_range("--max-tokens", self.max_tokens, 1, MOST_ITEMS)
        require_range("--seed", self.seed, 0, 2**62)
        if "" in self.stop:
            raise UserError("--stop '' ends every text before it begins: give some text")
        if self.prompt is not None and self.prompts is not None:
            raise UserError(f"--prompt and --prompts {self.prompts} exclude each other: give one")
        if self.chat and self.prompts is not None:
            raise UserError(f"--chat answers turns, not --prompts {self.prompts}: leave one out")
        if self.system is not None and not self.chat:
            raise UserError(f"--system {self.system!r:.40} belongs to --chat: give it, too")

    @property
    def sampling(self) -> "Sampling":
        """Sampling options."""
        from launcher.run.sampling import Sampling  # torch, which --help does not need

        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
