"""Table of techniques and strategies: which go together, and reasons for refusals.

No table is maintained by hand: each cell asks `resolve`, as every run does before it starts.
docs/matrix.md holds the output, and a test trains each pair that runs on a CPU.
"""

import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType
from typing import Any, Final, get_args

from launcher.compare.sweep.grid import expand_strategy
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.model.attention import KERNELS
from launcher.optim.choice import PRECISIONS, OptimizerName
from launcher.strategies import VARIANTS, strategy_of
from launcher.util import tables
from launcher.util.errors import NotInstalled, UserError, naming

LABELS: Final = tuple(VARIANTS)
RANKS: Final = 2
"""Ranks of every strategy that needs several."""
BEGIN: Final = "<!-- shardscale matrix: begin -->\n"
FLAGS_WIDTH: Final = 26
CELL_WIDTH: Final = len("GPU (a)")
END: Final = "<!-- shardscale matrix: end -->\n"

_Note = tuple[list[str], list[str]]  # words of the merged sentence, and the sentences in it
_BF16: Final = {"precision": "bf16"}
_LOW_WEIGHTS: Final = next(p for p, known in PRECISIONS.items() if not known.keeps_fp32)
_DISK: Final = {"nvme_path": Path("DIR")}
_ACCUMULATED: Final = {"micro_batch": 2, "global_batch": 8}  # twice on RANKS ranks
# The options that turn the decoder into Llama, Qwen and Mistral, all at once.
ROPE_DECODER: Final = {
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "d_ff": 96, "tied": False},
    **{"kv_heads": 2, "head_dim": 48, "qk_norm": True},
    "bias": "qkv",
}

# Technique as written -> fields it sets. Equal rows of one group are shown as one.
GROUPS: Final[Sequence[Mapping[str, Mapping[str, Any]]]] = (
    dict.fromkeys(
        (
            *("--position rope", "--norm rms", "--activation swiglu", "--kv-heads N"),
            *("--head-dim N", "--qk-norm", "--bias"),
        ),
        ROPE_DECODER,
    ),
    {
        **{
            f"--attention {name}": {"attention": name, **(_BF16 if kernel.in_16_bits else {})}
            for name, kernel in KERNELS.items()
        },
        "--window W": {"window": 8},
        "--document-attention": {"document_attention": True},
        "--loss-chunk 0": {"loss_chunk": 0},
        "--loss-chunk N": {"loss_chunk": 24},
    },
    {"--compile": {"compile": True}},
    {
        **{f"--precision {name}": {"precision": name} for name in PRECISIONS},
        "--no-compensation": {"precision": _LOW_WEIGHTS, "compensation": False},
        "--grad-accum-dtype bf16": {"grad_accum_dtype": "bf16", **_BF16, **_ACCUMULATED},
    },
    {
        **{f"--optimizer {name}": {"optimizer": name} for name in get_args(OptimizerName)},
        "--moments-dtype bf16": {"moments_dtype": "bf16"},
        "--clip C": {"clip": 1.0},
        "--optimizer-in-backward": {"optimizer_in_backward": True, "clip": 0.0},
    },
    {
        "--activation-checkpointing selective": {"activation_checkpointing": "selective"},
        "--activation-checkpointing full": {"activation_checkpointing": "full"},
        "--activation-checkpointing every=K": {"activation_checkpointing": "every=2"},
        "--activation-checkpointing keep=PRODUCTS": {"activation_checkpointing": "keep=attention"},
        "--activation-checkpointing budget=SIZE": {"activation_checkpointing": "budget=1GiB"},
        "--mlp-tile N": {"mlp_tile": 24},
        "--global-batch (accumulation)": _ACCUMULATED,
        "--activation-checkpointing offload": {"activation_checkpointing": "offload"},
        "--reduce-each-micro-batch": {"reduce_each_micro_batch": True, **_ACCUMULATED},
    },
    {
        "--offload-optimizer cpu": {"offload_optimizer": "cpu"},
        "--offload-fraction F": {"offload_optimizer": "cpu", "offload_fraction": 0.5},
        "--offload-param cpu": {"offload_param": "cpu"},
        "--offload-optimizer nvme": {"offload_optimizer": "nvme", **_DISK},
        "--offload-param nvme": {"offload_param": "nvme", **_BF16, **_DISK},
    },
    {
        "--context-parallel N": {"context_parallel": 2},
        "--context-parallel-method ring": {
            "context_parallel": 2,
            "context_parallel_method": "ring",
        },
        "--tensor-parallel N": {"tensor_parallel": 2},
    },
    {"--memory-trace": {"memory_trace": True}},
)
TECHNIQUES: Final = {name: changes for group in GROUPS for name, changes in group.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Refusal of a technique under a strategy on each device; None if it runs."""

    cpu: str | None
    cuda: str | None


def print_matrix(file: Path | None, *, as_markdown: bool) -> None:
    """Print the table, or write it between the markers of a file."""
    width = tables.terminal_width()
    if file is not None:
        with naming(f"shardscale matrix {file}:"):
            text = with_matrix(_read(file))
        file.write_text(text, encoding="utf-8")
    elif as_markdown or width is None:
        print(markdown(), end="")
    else:
        show(width)


def with_matrix(text: str) -> str:
    """Replace the table between the markers of a Markdown text.

    Raises:
        UserError: the text has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise UserError(f"needs the lines {BEGIN.strip()} {END.strip()}")
    return before + begin + markdown() + end + after


def refusal(config: RunConfig, *, device_type: str) -> str | None:
    """Return the refusal of a run on `RANKS` ranks (`single`: one tensor-parallel group), or None.

    Packages that are not installed here are ignored.
    """
    alone = config.sharding.tensor_parallel
    world_size = RANKS if strategy_of(config).needs_group else alone
    try:
        resolve(config, world_size=world_size, device_type=device_type)
    except NotInstalled:
        return None
    except UserError as error:
        return str(error)
    return None


def cell(technique: str, strategy: str, decoder: Mapping[str, Any] = MappingProxyType({})) -> Cell:
    """Return the refusals of a technique under a strategy, by their names in the table.

    `decoder` sets further fields of the model, which must not change the answer.
    """
    changes = {**decoder, **TECHNIQUES[technique]}
    config = RunConfig().replace(**expand_strategy(strategy, {}), **changes)
    return Cell(cpu=refusal(config, device_type="cpu"), cuda=refusal(config, device_type="cuda"))


def markdown() -> str:
    """Format the table in Markdown, with the sentences that its letters refer to below it."""
    rows, notes = _rows()
    lines = [f"| | {' | '.join(LABELS)} |", "|---" * (1 + len(LABELS)) + "|"]
    for names, cells in rows:
        spelled = ", ".join(f"`{name}`" for name in names).replace("|", "\\|")
        lines.append(f"| {spelled} | {' | '.join(cells)} |")
    lines += ["", "<details><summary>Reasons</summary>", ""]
    lines += [f"- **{letter}**: {note}" for letter, note in notes.items()]
    return "\n".join([*lines, "", "</details>", ""])


def show(width: int) -> None:
    """Print the table on a terminal, in several parts if it is narrow."""
    rows, notes = _rows()
    first = tables.Column(title="", rank=tables.MUST, folds=FLAGS_WIDTH)
    beside = max(1, (width - FLAGS_WIDTH - tables.GAP) // (CELL_WIDTH + tables.GAP))
    for start in range(0, len(LABELS), beside):
        part = slice(start, start + beside)
        titles = [name.replace("-", tables.SHY) for name in LABELS[part]]
        columns = [tables.Column(title=title, rank=tables.MUST) for title in titles]
        cells = [["\n".join(names), *each[part]] for names, each in rows]
        tables.print_table([first, *columns], cells, otherwise="")
        print()
    for letter, note in notes.items():
        tables.say(f"{letter}: {note}")


def _rows() -> tuple[list[tuple[list[str], list[str]]], dict[str, str]]:
    """Compute the rows, with the techniques of each, and the sentences of the letters."""
    cells = {name: [cell(name, strategy) for strategy in LABELS] for name in TECHNIQUES}
    everything = (each for row in cells.values() for each in row)
    notes = merged(text for each in everything for text in (each.cpu, each.cuda) if text)
    pairs = itertools.product(ascii_lowercase, repeat=2)  # behind z: aa, ab
    names = map("".join, itertools.chain(ascii_lowercase, pairs))
    named = zip(notes.values(), names, strict=False)
    letters = {text: name for texts, name in named for text in texts}
    rows: list[tuple[list[str], list[str]]] = []
    for group in GROUPS:
        equal: dict[tuple[str, ...], list[str]] = {}
        for name in group:
            equal.setdefault(tuple(_shown(each, letters) for each in cells[name]), []).append(name)
        rows += [(_named(names), list(row)) for row, names in equal.items()]
    return rows, {letters[texts[0]]: note for note, texts in notes.items()}


def merged(sentences: Iterable[str]) -> dict[str, list[str]]:
    """Merge sentences that differ in one word (`this/that`) -> the sentences merged."""
    notes = [(re.findall(r"[\w-]+|[^\w-]+", s), [s]) for s in dict.fromkeys(sentences)]
    while pair := next(filter(_differ_in_one_word, itertools.combinations(notes, 2)), None):
        (words, texts), (others, more) = pair
        words[:] = [a if a == b else f"{a}/{b}" for a, b in zip(words, others, strict=True)]
        texts += more
        notes.remove(pair[1])
    return {"".join(words): texts for words, texts in notes}


def _differ_in_one_word(notes: tuple[_Note, _Note]) -> bool:
    words, others = (note[0] for note in notes)
    return len(words) == len(others) and sum(map(operator.ne, words, others)) == 1


def _shown(found: Cell, letters: Mapping[str, str]) -> str:
    on_cpu, on_gpu = (text and letters[text] for text in (found.cpu, found.cuda))
    if on_cpu == on_gpu:
        return on_cpu or "✓"
    if on_cpu and on_gpu:
        return f"{on_cpu}, {on_gpu}"
    return f"GPU ({on_cpu})" if on_cpu else f"CPU ({on_gpu})"


def _named(names: Iterable[str]) -> list[str]:
    """Join techniques of one flag: `--flag this|that`, `--another`."""
    values: dict[str, list[str]] = {}
    for name in names:
        flag, _, value = name.partition(" ")
        values.setdefault(flag, []).append(value)
    return [f"{flag} {'|'.join(each)}".strip() for flag, each in values.items()]


def _read(file: Path) -> str:
    """Read a file that will be rewritten.

    Raises:
        UserError: not a text, or not writable.
    """
    try:
        with file.open("r+", encoding="utf-8") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read and written ({error}): give a text file") from None
