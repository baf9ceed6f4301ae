"""What `shardscale prune` is asked for, and what of it a model cannot give."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import torch
import tyro

from launcher.checkpoint.pretrained.stored import Stored
from launcher.model.config import ModelConfig
from launcher.util.errors import UserError
from launcher.util.flags import MOST_ITEMS, require_range

GROUP: Final = 4
"""Of 2:4: consecutive weights of a row, of which two stay."""
KEPT_OF_GROUP: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneOptions:
    """Remove weights of a trained model's blocks; embeddings, norms, biases and the head stay."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    """A run folder (its newest checkpoint is taken), one checkpoint, or a folder that transformers'
    save_pretrained has written."""
    out: Path
    """Run folder to make; must not exist yet."""
    sparsity: float = 0.5
    """The part of the weights, heads or hidden units that goes."""
    pattern: Literal["unstructured", "2:4", "heads", "mlp"] = "unstructured"
    """unstructured: single weights become zero. 2:4: two of each four in a row do, which GPUs have
    matmuls for. heads: whole attention heads go (with grouped queries a key/value head and its
    queries), mlp: hidden units of the MLP; both give a smaller dense model."""
    method: Literal["magnitude", "wanda"] = "magnitude"
    """What goes first: the smallest weights, or the smallest products of a weight and the norm of
    what it is multiplied with in a text (Wanda)."""
    data: str | None = None
    """The text to measure on, as --data in training (the run's own when not given); none: no
    perplexity is measured."""
    calibration_tokens: int = 65_536
    """wanda: so many tokens of the training split are read, in whole sequences."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes: a GPU when there is one (auto)."""

    def __post_init__(self) -> None:
        if not 0 < self.sparsity < 1:
            raise UserError(
                f"--sparsity {self.sparsity} must be above 0 and below 1: 0.5 removes half"
            )
        if self.pattern == "2:4" and self.sparsity != KEPT_OF_GROUP / GROUP:
            raise UserError(
                f"--sparsity {self.sparsity} with --pattern 2:4, which removes two of four: give "
                "0.5, or --pattern unstructured"
            )
        require_range("--calibration-tokens", self.calibration_tokens, 1, MOST_ITEMS)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: this machine has no GPU; give --device cpu")

    @property
    def structured(self) -> bool:
        """Whether the result is a smaller dense model, without masks."""
        return self.pattern in ("heads", "mlp")

    @property
    def torch_device(self) -> torch.device:
        """Where it runs, with `auto` resolved."""
        on_gpu = self.device != "cpu" and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")

    @property
    def by_row(self) -> bool:
        """Whether weights compete within their row (arXiv:2306.11695) and not within their matrix,
        as magnitudes do (layer by layer, arXiv:1506.02626)."""
        return self.method == "wanda"

    def removed_of(self, count: int) -> int:
        """Of `count` weights, groups of heads or units, how many go: the nearest whole number."""
        return round(self.sparsity * count)


def check_prunable(stored: Stored, options: PruneOptions) -> None:
    """The model is one whose weights can go as asked for.

    Raises:
        UserError: it is not.
    """
    config = stored.config
    if config.lora is not None:
        raise UserError(
            f"{options.run}: has adapters beside frozen weights: merge them first with shardscale "
            "export --merge, and prune what that writes"
        )
    if config.masks:
        raise UserError(
            f"{options.run}: is pruned already, and trained with its masks: prune the run that it "
            "was made of, or train it on with --no-masks first"
        )
    if options.structured:
        _check_narrower(config, options)
    else:
        _check_rows(config, options)


def _check_rows(config: ModelConfig, options: PruneOptions) -> None:
    for inner, outer in config.linear_shapes:
        if options.pattern == "2:4" and inner % GROUP:
            raise UserError(
                f"--pattern 2:4 takes rows of a multiple of 4 weights, and a projection of this "
                f"model has {inner} in a row: use --pattern unstructured"
            )
        count = inner if options.by_row else inner * outer
        if not 0 < options.removed_of(count) < count:
            raise UserError(
                f"--sparsity {options.sparsity} removes {options.removed_of(count)} of the {count} "
                "weights that compete: choose one nearer to 0.5"
            )


def _check_narrower(config: ModelConfig, options: PruneOptions) -> None:
    if options.pattern == "mlp":
        removed, units = options.removed_of(config.ffn_dim), config.ffn_dim
        if not 0 < removed < units:
            raise UserError(
                f"--sparsity {options.sparsity} removes {removed} of the {units} hidden units "
                "of each MLP: choose one nearer to 0.5"
            )
        return
    groups = config.kv_head_count
    what = f"{groups} heads" if groups == config.heads else f"{groups} key/value heads"
    if groups == 1:
        raise UserError(
            f"--pattern heads: each layer has {what[:-1]}, and one must stay: use --pattern mlp"
        )
    part = options.sparsity * groups
    if not math.isclose(part, round(part), abs_tol=1e-6) or not 0 < round(part) < groups:
        least, most = 1 / groups, (groups - 1) / groups
        raise UserError(
            f"--sparsity {options.sparsity} of {what} is {part:g}, and whole ones go while one "
            f"stays: give a multiple of {least:.6g} up to {most:.6g}"
        )
