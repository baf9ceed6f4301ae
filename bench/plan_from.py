"""Configs of other trainers against what those trainers are said to take.

    python bench/plan_from.py [--output bench/results]

Rows of `published_rows.py` of torchtitan, LitGPT, and transformers with DeepSpeed are written as
the file that their trainer takes, planned by `shardscale plan --from`, and held against the
published bytes, or against the verdict. Writes plan_from.json and plan_from.md.
"""

import argparse
import contextlib
import io
import json
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from published_rows import Row, published_rows

from launcher.tools.plan_from.plan_from_cli import main as plan_from

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
LEAST_TIGHT = ("fits", "tight")


def flags_of(row: Row) -> dict[str, str]:
    """Flags of the published run; a switch is "True"."""
    found: dict[str, str] = {}
    words = shlex.split(row.flags)
    for number, word in enumerate(words):
        if word.startswith("--"):
            following = words[number + 1] if number + 1 < len(words) else "--"
            found[word[2:]] = "True" if following.startswith("--") else following
    return found


def torchtitan(flags: dict[str, str]) -> str:
    """Its TOML: checkpointing per operator where the row has what stands for it."""
    name, _, size = flags["model"].rpartition("-")
    kept = flags["activation-checkpointing"]
    mode, option = kept, "2"
    if "/" in kept:
        mode, option = "selective", "op"
    elif kept.startswith("every="):
        mode, option = "selective", kept.partition("=")[2]
    family = {"llama-3.1": "llama3", "llama-2": "llama2", "qwen3": "qwen3"}[name]
    converters = '["float8"]' if flags["precision"] == "fp8" else "[]"
    # Keys of 2024 and of mid-2025 on, which differ in what the loss holds.
    old = flags.get("loss-chunk") == "0"
    compiles = "compile" in flags
    old_lines = f"batch_size = {flags['micro-batch']}\ncompile = {str(compiles).lower()}"
    batch = old_lines if old else f"local_batch_size = {flags['micro-batch']}"
    section = "" if old else f"[compile]\nenable = {str(compiles).lower()}\n"
    return f"""[model]
name = "{family}"
flavor = "{size.upper()}"
converters = {converters}
[training]
{batch}
global_batch_size = {flags["global-batch"]}
seq_len = {flags["seq-len"]}
[parallelism]
tensor_parallel_degree = {flags.get("tensor-parallel", 1)}
context_parallel_degree = {flags.get("context-parallel", 1)}
[activation_checkpoint]
mode = "{mode}"
selective_ac_option = "{option}"
{section}"""


def litgpt(row: Row, flags: dict[str, str]) -> str:
    """Its YAML."""
    return f"""model_name: tiny-llama-1.1b
precision: bf16-true
devices: {row.gpus}
train:
  micro_batch_size: {flags["micro-batch"]}
  global_batch_size: {flags["global-batch"]}
  max_seq_length: {flags["seq-len"]}
"""


def training_arguments(row: Row, flags: dict[str, str]) -> dict[str, str]:
    """TrainingArguments, and the DeepSpeed file beside it if there is one."""
    args: dict[str, Any] = {
        "output_dir": "out",
        "model_name_or_path": flags["model"],
        "block_size": int(flags["seq-len"]),
        "per_device_train_batch_size": int(flags["micro-batch"]),
        "learning_rate": 5e-5,
        "fp16": True,
        "attn_implementation": "eager",
        # transformers 4.12 updates tensor by tensor, which holds no temporary of all weights.
        "optim": "adamw_torch_fused",
        "num_processes": row.gpus,
    }
    files = {}
    if "zero" in flags:
        args["deepspeed"] = "zero.json"
        section = {"stage": int(flags["zero"])}
        files["zero.json"] = json.dumps({"fp16": {"enabled": True}, "zero_optimization": section})
    return {"args.json": json.dumps(args), **files}


def files_of(row: Row) -> dict[str, str] | None:
    """The files of the run, the first one to plan; None for other trainers."""
    flags = flags_of(row)
    if row.key.startswith(("torchtitan-", "torchao-")):
        return {"titan.toml": torchtitan(flags)}
    if row.key.startswith("litgpt-") and "ddp" not in row.key:
        return {"lit.yaml": litgpt(row, flags)}
    if row.key.startswith("autotuning-"):
        return training_arguments(row, flags)
    return None


def planned(row: Row, files: dict[str, str]) -> dict[str, Any]:
    """Plan a config and return the record of `plan --from`; a refusal has its sentence."""
    out, err = io.StringIO(), io.StringIO()
    with TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        first = str(Path(folder) / next(iter(files)))
        place = ["--gpu", row.gpu, "--gpus", str(row.gpus)]
        place += ["--gpus-per-node", str(row.gpus_per_node), "--no-calibration"]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = plan_from(["--check", "--json", "--from", first, *place])
    if code == 2:
        return {"refused": err.getvalue().strip().replace(f"{folder}/", "")}
    record: dict[str, Any] = json.loads(out.getvalue())[0]
    return record


def results() -> Iterator[dict[str, Any]]:
    """One record per row of these trainers that says bytes, or whether it runs."""
    for row in published_rows():
        files = files_of(row)
        published = row.allocated_bytes or row.reserved_bytes
        if files is None or (published is None and row.runs is None):
            continue
        record = planned(row, files)
        kind = "allocated" if row.allocated_bytes else "reserved"
        found = record.get(f"{kind}_bytes")
        yield {
            "key": row.key,
            "source": row.source,
            "kind": kind if published else "runs",
            "published_bytes": published,
            "planned_bytes": found if published else None,
            "ratio": found / published if published and found else None,
            "runs": row.runs,
            "verdict": record.get("verdict"),
            "refused": record.get("refused"),
        }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The tables."""
    errors = [abs(row["ratio"] - 1) for row in rows if row["ratio"]]
    wrong = [row for row in rows if row["runs"] is False and row["verdict"] == "fits"]
    said = [row for row in rows if row["runs"] is not None and row["verdict"]]
    right = [row for row in said if row["runs"] == (row["verdict"] in LEAST_TIGHT)]
    lines = [
        "# Configs of other trainers, planned and published",
        "",
        f"- bytes: {len(errors)} figures, median error {statistics.median(errors):.1%}, "
        f"worst {max(errors):.1%}",
        f"- whether it runs: {len(right)} of {len(said)} said right; {len(wrong)} that ran out of "
        'memory "fit"',
        "",
        "| row | kind | published | planned | ratio | verdict |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        if row["refused"]:
            lines.append(f"| {row['key']} | refused: {row['refused']} | | | | |")
            continue
        figures = ("published_bytes", "planned_bytes")
        shown = [f"{row[name] / GIB:.2f} GiB" if row[name] else "" for name in figures]
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else f"runs: {row['runs']}"
        lines.append(
            f"| {row['key']} | {row['kind']} | {' | '.join(shown)} | {ratio} | {row['verdict']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    folder = parser.parse_args().output
    rows = list(results())
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"rows": rows}, indent=1) + "\n"
    (folder / "plan_from.json").write_text(text, encoding="utf-8")
    (folder / "plan_from.md").write_text(markdown(rows), encoding="utf-8")
    print(markdown(rows))


if __name__ == "__main__":
    main()
