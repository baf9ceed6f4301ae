"""Names of the previous version: renamed flags and fields are read, removed ones answered."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from launcher.model.config_checks import spelled_bias
from launcher.util.errors import UserError, refused, tell
from launcher.util.flags import as_flags, flag

RENAMED: Final[Mapping[str, str]] = {
    "sequence_parallel": "context_parallel",
    "sequence_method": "context_parallel_method",
    "board": "report_to",
}
"""Old name -> new one. Flags, files and records are read with either."""


_DEEPSPEED_FILE = "in a --deepspeed file"
REMOVED: Final[Mapping[str, tuple[Any, str, Mapping[str, Any]]]] = {
    "quiet": (False, "use --log-level warning", {"log_level": "warning"}),
    "tensorboard": (True, "use --report-to none", {"report_to": "none"}),
    "save_last": (True, "use --save-every 0", {"save_every": 0}),
    "memory_snapshot": (False, "use --memory-trace", {"memory_trace": True}),
    "sdpa_backend": ("auto", "use --attention sdpa-math", {"attention": "sdpa-{}"}),
    "max_skipped_steps": (20, "20 skipped steps in a row end a run", {}),
    "sample_prompt": (None, "samples of --sample-every begin a new text", {}),
    "bucket": (None, f"set zero_optimization.reduce_bucket_size {_DEEPSPEED_FILE}", {}),
    "data_stream": (None, "append it to --data hf:NAME as [:2GB]", {"data": "{data}[:{}]"}),
    "expandable_segments": (True, "set PYTORCH_ALLOC_CONF=expandable_segments:False", {}),
    "nvme_buffer": ("64MiB", f"set zero_optimization.sub_group_size {_DEEPSPEED_FILE}", {}),
    "sample_every_s": (1.0, "every second is sampled", {}),
    "tf32": (False, "use --precision tf32", {"precision": "tf32"}),
    "warmup_ratio": (
        None,
        "use --warmup-steps with a fraction of the schedule",
        {"warmup_steps": "{}"},
    ),
    "nvme_block": ("1MiB", f"set aio.block_size {_DEEPSPEED_FILE}", {}),
    "nvme_queue_depth": (32, f"set aio.queue_depth {_DEEPSPEED_FILE}", {}),
    "nvme_threads": (1, f"set aio.intra_op_parallelism {_DEEPSPEED_FILE}", {}),
    "nvme_overlap": (False, f"set pipeline_read and pipeline_write {_DEEPSPEED_FILE}", {}),
}
"""Removed field -> its default, which every file of the previous version holds; what to do instead;
and the fields that another value becomes, which may name it as {} and the file's `data` as {data}.
Without any, a line of a file is ignored with a note, and a flag is rejected."""

_BIASES = ("attention_bias", "qkv_bias", "mlp_bias")
SWITCHES: Final = {"True": True, "on": True, "False": False, "off": False}
"""Spelled values of a flag that is on or off."""
_noted: set[str] = set()


def in_flags(tokens: Sequence[str]) -> list[str]:
    """Return the flags, spelled with dashes, in today's names.

    Raises:
        UserError: a removed flag that has no equivalent.
    """
    biases: dict[str, bool] = {}
    left: list[str] = []
    for token in tokens:
        own, has_value, value = token.partition("=")
        name = own.removeprefix("--no-").removeprefix("--").replace("-", "_")
        if name not in _BIASES or not own.startswith("--"):
            left += _today(token)
            continue
        asked = SWITCHES.get(value) if has_value else True
        negated = own.startswith("--no-")
        if asked is None or (negated and has_value) or any(t.startswith("--bias") for t in tokens):
            raise UserError(f"{token} was removed: use --bias qkv,proj,mlp alone")
        biases[name] = asked != negated
        _note(name, f"{own} was removed and goes with 0.4: use --bias qkv,proj,mlp")
    return [*left, *(f"{flag(name)}={value}" for name, value in with_bias(biases).items())]


def with_bias(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with `bias` in place of the previous version's three. Of those, ones that
    are not given follow from the others: qkv's alone makes Qwen 2's biases, no attention's Llama's.

    Raises:
        ValueError: one is neither true nor false, or `bias` is there too.
    """
    attention, qkv, mlp = (fields.get(name) for name in _BIASES)
    left = {name: value for name, value in fields.items() if name not in _BIASES}
    if attention is qkv is mlp is None:
        return left
    for name in _BIASES:
        value = fields.get(name)
        if value is not None and (type(value) is not bool or left.get("bias") is not None):
            raise ValueError(f"has {name} {value!r:.40}, which was removed: use bias qkv,proj,mlp")
    if mlp is None:
        mlp = attention is not False and qkv is None
    if attention is None:
        attention = not qkv
    has = {"qkv": attention if qkv is None else qkv, "proj": attention, "mlp": mlp}
    return left | {"bias": spelled_bias([name for name, biased in has.items() if biased])}


def _today(token: str) -> Iterator[str]:
    own, has_value, value = token.partition("=")
    negated = own.startswith("--no-")
    name = own.removeprefix("--no-" if negated else "--").replace("-", "_")
    if not own.startswith("--"):
        yield token
    elif name in RENAMED:
        _note_renamed(name, flag)
        yield (
            ("--no-" + flag(RENAMED[name])[2:] if negated else flag(RENAMED[name]))
            + has_value
            + value
        )
    elif name in REMOVED:
        default, instead, fields = REMOVED[name]
        if not fields or not isinstance(default, bool):
            raise UserError(f"{own} was removed: {instead}")
        asked = not negated if not has_value else value == "True"
        _note(name, f"{own} was removed and goes with 0.4: {instead}")
        if asked != default:
            yield as_flags(fields).replace(" ", "=")
    else:
        yield token


def in_file(content: Mapping[str, Any], *, noted: bool = True) -> dict[str, Any]:
    """Return the fields of a file, or with `noted` false of a checkpoint, in today's names.

    Where `noted`, print what has become of the others.

    Raises:
        UserError: biases that are neither the previous version's nor today's.
    """
    with refused(ValueError):
        content = with_bias(content)
    fields: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    for key, value in content.items():
        if key in RENAMED:
            if noted:
                _note_renamed(key, str)
            fields[RENAMED[key]] = value
        elif key not in REMOVED:
            fields[key] = value
        elif value not in (None, REMOVED[key][0]):
            _, instead, becomes = REMOVED[key]
            if noted:
                ignored = "" if becomes else ", and is ignored"
                _note(key, f"{key} {value} was removed{ignored}: {instead}")
            data = content.get("data", "")
            for name, new in becomes.items():
                if new == "{}":
                    new = value
                replaced[name] = new.format(value, data=data) if isinstance(new, str) else new
    return fields | replaced


def _note_renamed(name: str, spelled: Callable[[str], str]) -> None:
    new = RENAMED[name]
    _note(name, f"{spelled(name)} is called {spelled(new)} now, and its old name goes with 0.4")


def _note(name: str, text: str) -> None:
    """Print a note once per process; where ranks have an agent, the agent has printed it."""
    if name not in _noted and "RANK" not in os.environ:
        _noted.add(name)
        tell(text)
