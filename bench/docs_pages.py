"""Tables of docs/ that come from results and types: rewrites what stands between

    <!-- docs_pages: KIND ARGUMENTS -->
    <!-- docs_pages: end -->

in the README and every page. tests/unit/house/test_docs.py says when a page is behind.

    python bench/docs_pages.py
"""

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import architectures
import gpu_page
import rehearsals_table
from runs import ROOT
from will_it_fit import CHOICES, GPUS, MODELS

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.predict import by_category, predict
from launcher.measure import records
from launcher.measure.hardware import gpu_named
from launcher.model.names import known_names
from launcher.model.sizes import NAMED
from launcher.util.errors import ExitCode
from launcher.util.sizes import GIB, MIB

DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(
    r"(?<=<!-- docs_pages: )(?P<kind>[\w-]+)(?P<arguments>[^\n]*) -->\n.*?<!-- docs_pages: end -->",
    re.DOTALL,
)
MARKS = {"fits": "✓", "tight": "~", "does not fit": "✗"}
ASKED_FOR = {
    "single": "`--strategy single`",
    "ddp": "`--strategy ddp`",
    "fsdp": "`--strategy fsdp`",
    "zero1": "`--zero 1`",
    "zero2": "`--zero 2`",
    "zero3": "`--zero 3`",
    "zero2+cpu": "`--zero 2 --offload-optimizer cpu`",
    "zero3+cpu": "`--zero 3 --offload-optimizer cpu`",
    "zero3+cpu+param": "`--zero 3 --offload-optimizer cpu --offload-param cpu`",
    "LoRA": "`--strategy single --lora-rank 8 --lora-targets all`",
    "LoRA, nf4": "`--strategy single --lora-rank 8 --lora-targets all --quantize-base nf4`",
    "fsdp, LoRA": "`--strategy fsdp --lora-rank 8 --lora-targets all`",
}
WHOLE = {
    1: ("single", "zero2+cpu", "zero3+cpu+param"),
    4: ("ddp", "zero1", "fsdp", "zero3+cpu", "zero3+cpu+param"),
    8: ("ddp", "zero1", "fsdp", "zero3+cpu", "zero3+cpu+param"),
}
"""Ways of training all weights, the simplest and fastest first."""
RECORDS = (
    *(records.RunRecord, records.StepRecord, records.EvalRecord, records.SampleRecord),
    *(records.EventRecord, records.PhaseRecord, records.GpuRecord),
)
FILES = (
    *(records.Status, records.Summary, records.RankSummary),
    *(records.SamplerSummary, records.Sweep, records.SweepRow),
)


def filled(text: str) -> str:
    """A page with today's tables."""

    def fill(found: re.Match[str]) -> str:
        kind, arguments = found["kind"], found["arguments"].strip()
        names = [name.strip() for name in arguments.split(";") if name.strip()]
        table = KINDS[kind](names)
        return f"{kind}{found['arguments']} -->\n{table}\n<!-- docs_pages: end -->"

    return BLOCK.sub(fill, text)


def rows_of(result: str, key: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """The named rows of a result, in the order of the names."""
    rows = json.loads((RESULTS / result).read_text(encoding="utf-8"))["rows"]
    by_name = {row[key]: row for row in rows}
    return [by_name[name] for name in names]


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all columns but the first to the right."""
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n" + "\n".join(lines) + "\n"


def techniques(names: Sequence[str]) -> str:
    """Return the table of bench/techniques.py: arithmetic beside what was measured."""
    titles = ("", "peak without, MiB", "with, MiB", "saved, by arithmetic", "measured")
    shown = []
    for row in rows_of("techniques.json", "technique", names):
        without, with_ = row["peaks_bytes"]
        sizes = (without, with_, row["expected_bytes"], without - with_)
        shown.append((row["technique"], *(f"{size / MIB:.1f}" for size in sizes)))
    return markdown(titles, shown)


def precision(names: Sequence[str]) -> str:
    """Return the table of bench/precision.py: test losses after the same steps."""
    reference, *_ = rows_of("precision.json", "name", ["fp32"])
    shown = [
        (
            row["name"],
            f"{row['test_loss']:.4f}",
            f"{row['test_loss'] - reference['test_loss']:+.4f}",
        )
        for row in rows_of("precision.json", "name", names)
    ]
    return markdown(("", "test loss", "minus fp32's"), shown)


def offload(names: Sequence[str]) -> str:
    """Return the table of bench/offload.py, on a CPU."""
    titles = ("", "tokens/s of the same without", "device, GiB", "disk, GiB")
    shown = []
    for row in rows_of("offload.json", "name", names):
        ratio = sorted(row["ratios"])[len(row["ratios"]) // 2]
        sizes = (row["device_bytes"] / GIB, row["disk_bytes"] / GIB)
        shown.append((row["name"], f"{ratio:.2f}", *(f"{size:.3f}" for size in sizes)))
    return markdown(titles, shown)


def cells() -> dict[tuple[str, int, str, str], dict[str, Any]]:
    """Return cells of bench/will_it_fit.py: (model, GPUs, choice, GPU) -> what was said of it."""
    rows = json.loads((RESULTS / "will_it_fit.json").read_text(encoding="utf-8"))
    return {(row["model"], row["gpus"], row["choice"], row["gpu"]): row for row in rows}


def gpu_titles() -> list[str]:
    return [f"{name} ({gpu_named(name).memory_gib:g})" for name in GPUS]


def model_title(name: str) -> str:
    billions = NAMED[name].parameter_count / 1e9
    return f"{name} ({billions:.1f}B)" if f"{billions:.0f}b" not in name else name


def fit(arguments: Sequence[str]) -> str:
    """A tab per choice on so many GPUs, a row per model, a column per GPU."""
    gpus, found, tabs = int(arguments[0]), cells(), []
    for choice in CHOICES[gpus]:
        rows, host = [], False
        for model in MODELS:
            row = [found[model, gpus, choice, gpu] for gpu in GPUS]
            size = max(cell["host_bytes"] for cell in row)
            host = host or size > 0
            shown = [f"{cell['used_bytes'] / GIB:.1f} {MARKS[cell['verdict']]}" for cell in row]
            rows.append((model_title(model), *shown, f"{size / GIB:.0f}"))
        titles = ["GiB of each GPU", *gpu_titles(), "host, GiB in all"]
        table = markdown(titles, rows) if host else markdown(titles[:-1], [r[:-1] for r in rows])
        indented = "\n".join(f"    {line}".rstrip() for line in table.splitlines())
        tabs.append(f'=== "{choice}"\n\n    {ASKED_FOR[choice]}\n{indented}\n')
    return "\n" + "\n".join(tabs)


def simplest(_: Sequence[str]) -> str:
    """All weights: the first way that fits, by model, GPU and number of GPUs."""
    found, rows = cells(), []
    for model in MODELS:
        for gpus, ways in WHOLE.items():
            shown = []
            for gpu in GPUS:
                fitting = (way for way in ways if found[model, gpus, way, gpu]["verdict"] == "fits")
                shown.append(next(fitting, "-").replace("+", " +"))
            rows.append((model_title(model) if gpus == 1 else "", str(gpus), *shown))
    return markdown(["", "GPUs", *gpu_titles()], rows)


def memory_of(models: Sequence[str]) -> str:
    """GiB of one of the largest GPUs, where nothing is short, by way and model."""
    found, gpu = cells(), "H200"
    rows = []
    for gpus in CHOICES:
        for choice in CHOICES[gpus]:
            row = [found[model, gpus, choice, gpu] for model in models]
            sizes = [
                f"{cell['used_bytes'] / GIB:.1f}" if cell["verdict"] == "fits" else "does not fit"
                for cell in row
            ]
            host = max(cell["host_bytes"] for cell in row) / GIB
            rows.append((f"{gpus} x {choice}", *sizes, f"{host:.0f}" if host else ""))
    titles = [f"GiB of each {gpu}", *map(model_title, models), "host, GiB in all"]
    return markdown(titles, rows)


def held(arguments: Sequence[str]) -> str:
    """Tabulate what a rank keeps between two steps in bf16, in planned bytes per parameter."""
    ranks = int(arguments[0])
    titles = ("", "weights", "fp32 master weights", "gradients", "moments", "in all")
    rows = []
    for name, changes in CHOICES[4].items():
        if "lora_rank" in changes or "offload_optimizer" in changes:
            continue
        config = RunConfig().replace(model="gpt2", precision="bf16", seq_len=64, **changes)
        resolved = resolve(config, world_size=ranks, device_type="cuda")
        lines = by_category(predict(resolved).held)
        sizes = [lines[key] for key in ("params", "master", "grads", "optimizer")]
        sizes.append(sum(lines.values()))
        parameters = NAMED["gpt2"].parameter_count
        rows.append((name, *(f"{size / parameters:.1f}" for size in sizes)))
    return markdown(titles, rows)


def exit_codes(_: Sequence[str]) -> str:
    """From their enum."""
    words = {
        ExitCode.DONE: "done",
        ExitCode.NOTHING_FITS: "of `plan`: nothing fits",
        ExitCode.REFUSED: "refused: bad input, nothing was started",
        ExitCode.OUT_OF_MEMORY: "out of memory",
        ExitCode.FAILED: "failed",
        ExitCode.PREEMPTED: "preempted, and saved",
        ExitCode.INTERRUPTED: "ended by Ctrl-C; a run in training is saved",
    }
    rows = [(str(int(code)), words[code]) for code in ExitCode]
    return markdown(("code", "means"), rows).replace("---:", "---")


def shapes(_: Sequence[str]) -> str:
    """A row per architecture of the known shapes."""
    kinds: dict[str, list[str]] = {}
    for known in known_names().values():
        if known.config is not None:
            names = kinds.setdefault(known.config["model_type"], [])
            names.append(f"{known.name} ({known.parameters})")
    rows = [(f"`{kind}`", ", ".join(names)) for kind, names in kinds.items()]
    return markdown(("architecture", "`--model` (parameters)"), rows).replace("---:", "---")


def schema(types: Sequence[type]) -> str:
    """A section per type, a row per field, with the text below the field."""
    sections = []
    for kind in types:
        text = inspect.cleandoc(kind.__doc__ or "")
        name = getattr(kind, "kind", None)
        title = f"`{name}`" if name else kind.__name__
        comments = _comments(kind)
        rows = [
            (
                f"`{field.name}`",
                f"`{_spelled(hints)}`".replace("|", "\\|"),
                comments.get(field.name, ""),
            )
            for field in dataclasses.fields(kind)
            for hints in [typing.get_type_hints(kind)[field.name]]
        ]
        table = markdown(("field", "type", ""), rows).replace("---:", "---")
        sections.append(f"\n### {title}\n\n{text}\n{table}")
    return "".join(sections)


def _spelled(hint: Any) -> str:
    """A type as it is written: `int | None`, `list[RankSummary]`."""
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    text = text.replace("typing.", "").replace("launcher.measure.records.", "")
    return re.sub(r"Literal\[([^]]*)\]", lambda m: m[1].replace(", ", " | "), text)


def _comments(kind: type) -> dict[str, str]:
    """Field -> the docstring below it."""
    found = re.findall(
        r"^    (\w+): [^\n]*\n    \"\"\"(.*?)\"\"\"", inspect.getsource(kind), re.M | re.S
    )
    return {name: " ".join(text.split()) for name, text in found}


KINDS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "techniques": techniques,
    "precision": precision,
    "offload": offload,
    **{"fit": fit, "simplest": simplest, "memory-of": memory_of, "held": held},
    **rehearsals_table.TABLES,
    **gpu_page.TABLES,
    **{"exit-codes": exit_codes, "architectures": architectures.table, "shapes": shapes},
    "records": lambda _: schema(RECORDS),
    "files": lambda _: schema(FILES),
}


def main() -> None:
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if (today := filled(text)) != text:
            page.write_text(today, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
