"""`shardscale prune`: read a trained model, remove weights, say what it costs, write a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from launcher.checkpoint.extra import Base
from launcher.checkpoint.pretrained.loading import build, open_source
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.config.resolve import check_run_folder
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.tools.prune import kinds
from launcher.tools.prune.choice import PruneOptions, check_prunable
from launcher.tools.prune.folder import REPORT_FILE, Pruned, write_folder
from launcher.tools.prune.kernels import said_of_two_of_four
from launcher.tools.prune.kinds import Kind, kinds_of
from launcher.tools.prune.narrow import narrower, prune_groups
from launcher.tools.prune.select import prune_in_place
from launcher.tools.prune.text import TEXT_FIELDS, Text, choice_of
from launcher.util import tables
from launcher.util.errors import ExitCode, UserError, refusing
from launcher.util.flags import one_sentence
from launcher.util.sizes import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A model that can be pruned, and what belongs to it."""

    config: ModelConfig
    model: GPT
    base: Base
    """Where its weights are from, with a fingerprint of them."""
    tokenizer: str | None
    beside: Path
    """Folder of what else belongs to it."""
    text: Text | None


@refusing
def main(argv: Sequence[str]) -> int:
    """Prune one model; 0 when the run folder is there, 2 when refused."""
    with one_sentence():
        options = tyro.cli(PruneOptions, args=list(argv), prog="shardscale prune")
    prune(options)
    return ExitCode.DONE


def prune(options: PruneOptions) -> None:
    """Make the run folder and print what has become of the model.

    Raises:
        UserError: there is no such model, it cannot be pruned so, or the folder cannot be made.
    """
    check_run_folder(options.out)
    opened = _open(options)
    text, model = opened.text, opened.model
    before = None if text is None else text.perplexity(model)
    norms = None
    if options.method == "wanda":
        assert text is not None  # _open has refused it
        norms = text.input_norms(model, options.calibration_tokens)
    if options.structured:
        masks, config = {}, narrower(opened.config, options)
        model = prune_groups(model, norms, options)
    else:
        masks, config = (
            prune_in_place(model, norms, options),
            dataclasses.replace(opened.config, masks=True),
        )
    after = None if text is None else text.perplexity(model)
    tensors = dict(model.named_parameters())
    found = kinds_of(opened.config, tensors, masked=bool(masks))
    report = _report(options, opened, found, (before, after))
    pruned = Pruned(
        config=config,
        tensors=tensors,
        masks=masks,
        tokenizer=opened.tokenizer,
        settings={} if text is None else _settings(text),
        report=report,
    )
    write_folder(options.out, pruned, opened.beside)
    _print(options, found, (before, after))


def _open(options: PruneOptions) -> Opened:
    """Everything that can be refused is, before the weights are read."""
    with open_stored(options.run) as stored:
        check_prunable(stored, options)
        checkpoint, base = stored.checkpoint, stored.base()
        saved: Mapping[str, Any] = {} if checkpoint is None else checkpoint.extra.get("config", {})
        choice = choice_of(saved, options.data)
        if choice is None and options.method == "wanda":
            raise UserError(
                f"--method wanda measures on a text, and {options.run} names none: give --data, or "
                "--method magnitude"
            )
        # Of a run that is alive, the checkpoint that was just looked at.
        place = options.run if checkpoint is None else checkpoint.path
    with open_source(place) as source:
        tokenizer = source.tokenizer()
        if choice is not None and tokenizer is None:
            raise UserError(
                f"{options.run}: came without a tokenizer, so that no text can be read: put its "
                "tokenizer.json there, or give --data none"
            )
        text = None
        if choice is not None and tokenizer is not None:
            text = Text.open(choice, tokenizer, source.config)
        return Opened(
            config=source.config,
            model=build(source, device=options.torch_device, dtype=torch.float32),
            base=base,
            tokenizer=tokenizer,
            beside=source.beside,
            text=text,
        )


def _settings(text: Text) -> dict[str, Any]:
    """The text and how it is cut, as the run that was pruned had it."""
    fields = {name: getattr(text.choice, name) for name in TEXT_FIELDS}
    return {**{n: v for n, v in fields.items() if v is not None}, "seq_len": text.seq_len}


def _report(
    options: PruneOptions,
    opened: Opened,
    found: Sequence[Kind],
    perplexities: tuple[float | None, float | None],
) -> dict[str, Any]:
    """What `pruning.json` and the checkpoint say."""
    text, wanda = opened.text, options.method == "wanda"
    read = (
        None if text is None or not wanda else text.calibration_tokens(options.calibration_tokens)
    )
    return {
        "source": opened.base.path,
        "fingerprint": opened.base.fingerprint,
        "pattern": options.pattern,
        "method": options.method,
        "sparsity": options.sparsity,
        "calibration_tokens": read,
        "perplexity": dict(zip(("before", "after"), perplexities, strict=True)),
        "kinds": [dataclasses.asdict(kind) for kind in found],
        "bytes": {
            name: {
                "dense": sum(kind.dense_bytes(value_bytes) for kind in found),
                "sparse": sum(kind.sparse_bytes(value_bytes) for kind in found),
            }
            for name, value_bytes in (("fp32", kinds.FP32_BYTES), ("bf16", kinds.BF16_BYTES))
        },
    }


def _print(
    options: PruneOptions,
    found: Sequence[Kind],
    perplexities: tuple[float | None, float | None],
) -> None:
    rows = [kinds.row(kind) for kind in found]
    tables.print_table(kinds.COLUMNS, rows, otherwise=f"all is in {options.out / REPORT_FILE}")
    before, after = perplexities
    if before is None:
        tables.say("perplexity: not measured, for lack of a text (--data)")
    else:
        tables.say(f"perplexity of the validation split: {before:.3f} before, {after:.3f} after")
    for line in _said(options, found):
        tables.say(line)


def _said(options: PruneOptions, found: Sequence[Kind]) -> list[str]:
    """What the bytes mean, and how to go on."""
    go_on = f"train it on: shardscale train --init-from {options.out} --lr LR --steps N"
    count = sum(kind.after for kind in found)
    if options.structured:
        return [f"{options.out}: a dense model of {count:,} parameters", go_on]
    dense, sparse = (
        sum(getattr(kind, f"{form}_bytes")(kinds.BF16_BYTES) for kind in found) / MIB
        for form in ("dense", "sparse")
    )
    lines = [
        "sparse: a bit for each weight, and the values that are not zero; in bf16 "
        f"{sparse:.2f} MiB of {dense:.2f}",
        "zeros save no memory while it is trained, and no time in PyTorch's own kernels",
    ]
    if options.pattern == "2:4":
        lines.append(said_of_two_of_four(options.torch_device))
    return [*lines, go_on]
