"""Options of `shardscale prune`, and checks of a model against them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

from launcher.config.transformers_config import require_own
from launcher.model.config import ModelConfig
from launcher.util.errors import UserError
from launcher.util.flags import MOST_ITEMS, require_range

GROUP: Final = 4
"""Consecutive weights per group of the 2:4 pattern, of which two stay."""
KEPT_OF_GROUP: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneOptions:
    """Prune the blocks of a trained model; embeddings, norms, biases and the head are kept."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    """A run folder (its newest checkpoint is used), one checkpoint, a folder written by
    transformers' save_pretrained, or hf:ORG/NAME."""
    out: Path
    """Run folder to write; must not exist yet."""
    sparsity: float = 0.5
    """Fraction of the weights, heads or hidden units to remove."""
    pattern: Literal["unstructured", "2:4", "heads", "mlp"] = "unstructured"
    """unstructured: zero single weights. 2:4: zero two of each four in a row, which GPUs have
    matmul kernels for. heads: remove attention heads (with grouped queries, a key/value head and
    its queries). mlp: remove hidden units of the MLP. The last two give a smaller dense model."""
    method: Literal["magnitude", "wanda"] = "magnitude"
    """Remove first: magnitude, the smallest weights; wanda, the smallest products of a weight and
    the norm of its input on a calibration text."""
    data: str | None = None
    """Text for calibration and perplexity, as --data in training (default: the run's own); none:
    measure no perplexity."""
    calibration_tokens: int = 65_536
    """wanda: tokens of the training split to calibrate on, in whole sequences;
    all of it where it is shorter."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU if there is one."""

    def __post_init__(self) -> None:
        if not 0 < self.sparsity < 1:
            raise UserError(
                f"--sparsity {self.sparsity} must be above 0 and below 1: 0.5 removes half"
            )
        if self.pattern == "2:4" and self.sparsity != KEPT_OF_GROUP / GROUP:
            raise UserError(
                f"--sparsity {self.sparsity} with --pattern 2:4, which removes half: give 0.5, or "
                "--pattern unstructured"
            )
        require_range("--calibration-tokens", self.calibration_tokens, 1, MOST_ITEMS)

    @property
    def structured(self) -> bool:
        """Return True if the result is a smaller dense model, without masks."""
        return self.pattern in ("heads", "mlp")

    @property
    def by_row(self) -> bool:
        """Return True if weights compete within their row, as in Wanda (arXiv:2306.11695).

        Magnitudes compete within their matrix (layer by layer, arXiv:1506.02626).
        """
        return self.method == "wanda"

    def removed_of(self, count: int) -> int:
        """Return the number of weights, heads or units to remove of `count`, rounded to nearest."""
        return round(self.sparsity * count)


def check_prunable(config: ModelConfig, options: PruneOptions) -> None:
    """Refuse a model that cannot be pruned as requested.

    Raises:
        UserError: names the obstacle and the fix.
    """
    require_own(config, f"{options.run}: shardscale prune")
    if config.lora is not None:
        raise UserError(
            f"{options.run} has adapters beside frozen weights: merge them first with shardscale "
            "export --merge, and prune the result"
        )
    if config.masks:
        raise UserError(
            f"{options.run} is already pruned and trained with its masks: prune the original run, "
            "or continue it with --no-masks first"
        )
    if options.structured:
        _check_narrower(config, options)
    else:
        _check_rows(config, options)


def _check_rows(config: ModelConfig, options: PruneOptions) -> None:
    for inner, outer in config.linear_shapes:
        if options.pattern == "2:4" and inner % GROUP:
            raise UserError(
                f"--pattern 2:4 needs rows of a multiple of 4 weights, but a projection of this "
                f"model has rows of {inner}: use --pattern unstructured"
            )
        count = inner if options.by_row else inner * outer
        if not 0 < options.removed_of(count) < count:
            raise UserError(
                f"--sparsity {options.sparsity} removes {options.removed_of(count)} of the {count} "
                "competing weights: choose a value nearer to 0.5"
            )


def _check_narrower(config: ModelConfig, options: PruneOptions) -> None:
    if options.pattern == "mlp":
        removed, units = options.removed_of(config.ffn_dim), config.ffn_dim
        if not 0 < removed < units:
            raise UserError(
                f"--sparsity {options.sparsity} removes {removed} of the {units} hidden units "
                "of each MLP: choose a value nearer to 0.5"
            )
        return
    groups = config.kv_head_count
    what = f"{groups} heads" if groups == config.heads else f"{groups} key/value heads"
    if groups == 1:
        raise UserError(
            f"--pattern heads: each layer has {what[:-1]}, and one must stay: use --pattern mlp"
        )
    part = options.sparsity * groups
    # 0.333333 of 3 heads is meant as 1, and 0.166667 of 12, as the sentence below prints it, as 2
    if not math.isclose(part, round(part), abs_tol=1e-6 * groups) or not 0 < round(part) < groups:
        least, most = 1 / groups, (groups - 1) / groups
        raise UserError(
            f"--sparsity {options.sparsity} of {what} is {part:g}, but whole heads go and one "
            f"must stay: give a multiple of {least:.6g} up to {most:.6g}"
        )
