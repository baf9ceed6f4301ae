"""Prune a trained model, and write it with its report."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from launcher.checkpoint.extra import Base
from launcher.checkpoint.pretrained.loading import Source, build, chosen_device, open_source
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.config.resolve import check_run_folder
from launcher.config.schema import DataChoice
from launcher.model.gpt import GPT
from launcher.tools.prune import kinds
from launcher.tools.prune.choice import PruneOptions, check_prunable
from launcher.tools.prune.folder import REPORT_FILE, write_folder
from launcher.tools.prune.kinds import Kind, kinds_of, two_of_four_note
from launcher.tools.prune.text import TEXT_FIELDS, Text, choice_of
from launcher.tools.prune.weights import narrower, prune_groups, prune_in_place
from launcher.util import tables
from launcher.util.errors import UserError
from launcher.util.flags import as_flags
from launcher.util.hub_cache import existing_model
from launcher.util.sizes import MIB


def prune(options: PruneOptions) -> None:
    """Write the run folder and print the result.

    Raises:
        UserError: no such model, not prunable as requested, or a folder that cannot be written.
    """
    check_run_folder(options.out)
    options = dataclasses.replace(options, run=existing_model(options.run))
    source, model, base, text = _open(options)
    before = None if text is None else text.perplexity(model)
    norms = None
    if options.method == "wanda":
        assert text is not None  # _open has refused it
        norms = text.input_norms(model, options.calibration_tokens)
    if options.structured:
        masks, config = {}, narrower(source.config, options)
        model = prune_groups(model, norms, options)
    else:
        masks, config = (
            prune_in_place(model, norms, options),
            dataclasses.replace(source.config, masks=True),
        )
    after = None if text is None else text.perplexity(model)
    tensors = dict(model.named_parameters())
    found = kinds_of(source.config, tensors, masked=bool(masks))
    report = _report(options, base, text, found, (before, after))
    write_folder(
        options.out,
        config=config,
        tensors=tensors,
        masks=masks,
        text_settings={} if text is None else _settings(text),
        source=source,
        report=report,
    )
    _print(options, text, found, (before, after))


def _open(options: PruneOptions) -> tuple[Source, GPT, Base, Text | None]:
    """Open the model; everything that can be refused is, before weights are read.

    Returns:
        Where it comes from, closed by then; the model; its weights' identity; its text.
    """
    device = chosen_device(options.device)
    with open_stored(options.run) as stored:
        check_prunable(stored.config, options)
        checkpoint, base = stored.checkpoint, stored.base()
        saved: Mapping[str, Any] = {} if checkpoint is None else checkpoint.extra.get("config", {})
        choice = choice_of(saved, options.data)
        if choice is None and options.method == "wanda":
            why = "--data is none" if options.data == "none" else f"{options.run} names none"
            raise UserError(
                f"--method wanda needs a calibration text, and {why}: give --data TEXT, or "
                "--method magnitude"
            )
        # A live run may have saved a newer checkpoint since: use the one just checked.
        place = options.run if checkpoint is None else checkpoint.path
    with open_source(place) as source:
        tokenizer = source.tokenizer()
        if choice is not None and tokenizer is None:
            raise UserError(
                f"{options.run} has no tokenizer, so no text can be read: add its tokenizer.json, "
                "or give --data none"
            )
        text = None
        if choice is not None and tokenizer is not None:
            text = Text.open(choice, tokenizer, source.config)
        return source, build(source, device=device, dtype=torch.float32), base, text


def _settings(text: Text) -> dict[str, Any]:
    fields = {name: getattr(text.choice, name) for name in TEXT_FIELDS}
    return {**{n: v for n, v in fields.items() if v is not None}, "seq_len": text.seq_len}


def _report(
    options: PruneOptions,
    base: Base,
    text: Text | None,
    found: Sequence[Kind],
    perplexities: tuple[float | None, float | None],
) -> dict[str, Any]:
    """Build the content of pruning.json, which the checkpoint holds too."""
    read = None
    if text is not None and options.method == "wanda":
        read = text.calibration_tokens(options.calibration_tokens)
    return {
        "source": base.path,
        "fingerprint": base.fingerprint,
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
    text: Text | None,
    found: Sequence[Kind],
    perplexities: tuple[float | None, float | None],
) -> None:
    rows = [kinds.row(kind) for kind in found]
    tables.print_table(kinds.COLUMNS, rows, otherwise=f"{options.out / REPORT_FILE} has them all")
    before, after = perplexities
    if before is None:
        tables.say("perplexity: not measured, because there is no text (--data)")
    else:
        tables.say(f"validation perplexity: {before:.3f} before, {after:.3f} after")
    for line in _notes(options, text, found):
        tables.say(line)


def _notes(options: PruneOptions, text: Text | None, found: Sequence[Kind]) -> list[str]:
    """Explain the bytes, and how to continue."""
    folder = shlex.quote(str(options.out))
    go_on = (
        f"continue training: shardscale train --init-from {folder} {_text_flags(text)} --lr LR "
        "--steps N"
    )
    count = sum(kind.after for kind in found)
    if options.structured:
        return [f"{options.out}: a dense model of {count:,} parameters", go_on]
    dense, sparse = (
        sum(getattr(kind, f"{form}_bytes")(kinds.BF16_BYTES) for kind in found) / MIB
        for form in ("dense", "sparse")
    )
    lines = [
        f"sparse: a bitmask and the nonzero values; in bf16 {sparse:.2f} MiB of {dense:.2f}",
        "zeros save no memory in training, and no time in PyTorch's dense kernels",
    ]
    if options.pattern == "2:4":
        lines.append(two_of_four_note(chosen_device(options.device)))
    return [*lines, go_on]


def _text_flags(text: Text | None) -> str:
    """Return the flags that select the same text in training."""
    if text is None:
        return "--data DATA"
    named: dict[str, Any] = {name: getattr(text.choice, name) for name in TEXT_FIELDS}
    default = DataChoice()
    fields = {n: v for n, v in named.items() if n == "data" or v != getattr(default, n)}
    return as_flags({n: shlex.quote(v) if isinstance(v, str) else v for n, v in fields.items()})
