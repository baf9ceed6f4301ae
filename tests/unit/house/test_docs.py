"""docs/ and the README: links, commands, tables, words, names of other tools, and the site."""

import dataclasses
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
import tyro
from docs_commands import (
    DOCS,
    README,
    RECORD,
    ROOT,
    Command,
    commands_of,
    expected,
    in_part,
    name_of,
    pages,
)
from docs_pages import filled
from will_it_fit import CHOICES, RESULT, cell

from launcher.__main__ import VERBS
from launcher.compare.report.report_cli import ReportOptions
from launcher.compare.sweep.grid_source import parse_options as parse_sweep
from launcher.config.arguments import parse_run_config
from launcher.config.deepspeed_file.table import KEYS, SECTIONS, TOP
from launcher.config.resolve import resolve
from launcher.forecast.cluster import find_cluster
from launcher.forecast.plan_cli import parse_options as parse_plan
from launcher.measure.hardware import gpu_named
from launcher.tools.exchange.choice import ExportOptions
from launcher.tools.generate.choice import GenerateOptions
from launcher.tools.plan_from.plan_from_cli import parse as parse_plan_from
from launcher.tools.rehearse import rehearse_cli
from launcher.tools.rent.rent_cli import parse as parse_rent
from launcher.tools.snapshot.snapshot_cli import snapshot_parser
from launcher.tools.watch import watch_cli
from launcher.torchrun import split_command
from launcher.torchrun_options import read_options

PAGES = [README, *sorted(DOCS.rglob("*.md"))]
COMMANDS = [(page, command) for page in pages() for command in commands_of(page)]
MADE = ("--init-from", "--resume", "--deepspeed", "--data", "--hf-config")
"""Flags whose files an earlier command of the page makes, or a download brings."""
OPTIONS = {"report": ReportOptions, "export": ExportOptions, "generate": GenerateOptions}
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def parts_of(text: str) -> Iterator[list[str]]:
    """The words of each program that a command line starts."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|;&<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word[0] in "|;&<>":
            yield words
            words = []
        else:
            words.append(word)
    yield words


def without_files(flags: list[str]) -> list[str]:
    """Flags of a training, less those that name a file which is not here."""
    kept, skip = [], False
    for word, following in zip_longest(flags, flags[1:]):
        names = word in MADE or (word == "--model" and following.startswith("hf:"))
        if not skip and not names:
            kept.append(word)
        skip = names
    return kept


def check_training(flags: list[str], ranks: int, *, started: bool) -> None:
    """The real parser takes the flags; for a run that nobody has started, so do the rules."""
    config = parse_run_config(without_files(flags), ranks)
    if not started and len(without_files(flags)) == len(flags):
        resolve(config, world_size=ranks, device_type="cuda")


def check(words: list[str], *, started: bool) -> None:
    """Parse a program's words as it would itself, where it is one of ours."""
    if words[:3] == ["python", "-m", "launcher.train"]:
        check_training(words[3:], 1, started=started)
    elif words[:1] == ["torchrun"]:
        own, program, flags = split_command(words[1:])
        read_options([*own, *program])
        assert program == ["-m", "launcher.train"]
        check_training(flags, int(own[own.index("--nproc-per-node") + 1]), started=started)
    elif words[:1] == ["make"]:
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:1] == ["sbatch"]:
        script = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
        subprocess.run(["bash", "-n", words[script]], cwd=ROOT, check=True)
        asked = dict(word.removeprefix("--").split("=") for word in words[1:script])
        ranks = int(asked["nodes"]) * int(asked["gpus-per-node"])
        check_training(words[script + 1 :], ranks, started=started)
    elif words[:1] == ["shardscale"]:
        verb, arguments = words[1], words[2:]
        assert verb in VERBS, words
        if verb == "train":
            check_training(arguments, 1, started=started)
        elif verb == "plan" and "--rent" in arguments:
            parse_plan(parse_rent(arguments)[1])
        elif verb == "plan" and {"--from", "--check"} & {*arguments}:
            parse_plan(parse_plan_from(arguments)[1])
        elif verb == "plan":
            options, training = parse_plan(without_files(arguments))
            parse_run_config(training, find_cluster(options)[0].world_size)
        elif verb == "sweep":
            _, training = parse_sweep(arguments)
            parse_run_config(training)
        elif verb == "snapshot":
            snapshot_parser().parse_args(arguments)
        elif verb in ("watch", "rehearse"):
            (watch_cli if verb == "watch" else rehearse_cli).parse(arguments)
        elif verb in OPTIONS:
            tyro.cli(OPTIONS[verb], args=arguments)
        else:
            assert started, f"{words}: parsed by running it only"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"


def sentences(text: str) -> Iterator[str]:
    """The sentences of Markdown: of paragraphs, of list items and of cells; code is one word."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->|<[^>]+>", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]+`", "code", re.sub(r"^(#+ .*)$", r"\n\1\n", text, flags=re.M))
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*|#>]|\s*\d+\. )|\|", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(block.split()))


def test_sentences_are_told_apart() -> None:
    page = "# Head\nOne `a. b`, [two](x.md).\nThree? |four| five.|\n- six\n\n```sh\nno\n```\nseven"
    assert [each for each in sentences(page) if each] == [
        *("# Head", "One code, two.", "Three?", "four", "five.", "- six", "seven"),
    ]


@pytest.mark.parametrize(
    "page", [README, DOCS / "index.md", *sorted((DOCS / "quickstart").glob("*.md"))], ids=name_of
)
def test_first_pages_are_short_sentences(page: Path) -> None:
    long = [s for s in sentences(page.read_text(encoding="utf-8")) if len(s.split()) > 25]
    assert long == [], f"{name_of(page)}: sentences over 25 words"


READS_AS_TRANSLATED = (
    "all their own set-up",
    "a flag that is given is not varied",
    "by constants fitted to published runs",
    "what goes with what",
    "cannot go with is",
    "go on elsewhere",
    "is there or not there",
    "would compute another function",
    "whatever kills",
    "under whatever",
    "is taken back",
    "in and out",
    "runs only what is not done",
    "nothing that lives long",
    "nothing hides it",
    "what the ranks say",
    "keys and values go around",
    "loses as much",
)
"""Phrases of which the field has a plain form."""


def test_prose_is_the_field_s() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "mkdocs.yml"]
    pages += [*(ROOT / "launcher").rglob("*.py"), *(ROOT / "model").rglob("*.py")]
    texts = {page: " ".join(page.read_text().lower().split()) for page in pages}
    assert len(texts) > 400
    found = [
        (str(p), said) for p, text in texts.items() for said in READS_AS_TRANSLATED if said in text
    ]
    assert not found


def test_the_readmes_figures_are_those_of_the_results() -> None:
    results, said = ROOT / "bench" / "results", " ".join(README.read_text(encoding="utf-8").split())
    published = (results / "published.md").read_text(encoding="utf-8")
    found = re.search(r"- bytes: .* median error (\S+%),.* worst (\S+%),", published)
    paces = re.search(r"- seconds: .* (\S+%) within 1.25x", published)
    peaks = re.search(r"worst (\S+)%", (results / "prediction.md").read_text(encoding="utf-8"))
    assert found
    assert paces
    assert peaks
    assert f"off by {found[1]} (median), at most {found[2]}. Seconds" in said
    assert f"within 1.25x for {paces[1]}." in said
    assert f"runs: worst error {float(peaks[1]):.1f}%" in said


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_scripts_that_are_named_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:bench|tests|launcher|ds_configs|slurm)/[\w./-]+)", text):
        assert (ROOT / name.rstrip(".")).exists(), f"{name_of(page)}: {name}"


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=[f"{name_of(page)}-{c.text[:50]}" for page, c in COMMANDS]
)
def test_commands_are_taken(page: Path, command: Command) -> None:
    for words in parts_of(re.sub(r"\s#.*|\d>&\d", "", command.text)):
        check(words, started=command.is_run)


def test_every_command_was_run_as_it_is_written() -> None:
    """By bench/docs_commands.py, which ends where one does not end as the page says."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert recorded == expected(), "run: python bench/docs_commands.py --behind"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_their_sources(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, f"{name_of(page)} is behind: python bench/docs_pages.py"


def test_lines_are_found_again_when_figures_have_changed() -> None:
    printed = ["sharding  s/step", "zero3      1.0", "zero3+cpu  2.0", "fits, 3GiB", "fits, 4GiB"]
    shown = ["zero3+cpu  9.9", "zero3 0.1", "fits, 0GiB"]
    assert in_part(shown, printed) == ["zero3+cpu  2.0", "zero3      1.0", "fits, 3GiB"]
    with pytest.raises(SystemExit, match="ddp"):
        in_part(["ddp 1.0"], printed)


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Name there and flags here of each row of a page of migration."""
    for line in (DOCS / "migrate" / page).read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| `([^`]+)`", line)
        if found:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            flags = next((cell for cell in cells[1:] if cell.startswith("`--")), "")
            yield found[1], " ".join(re.findall(r"`(--[^`]+)`", flags))


@pytest.mark.parametrize("page", ["trainer.md", "accelerate.md", "deepspeed.md", "torchtitan.md"])
def test_our_side_of_a_migration_is_taken(page: str) -> None:
    found = [flags for _, flags in rows(page) if flags]
    assert len(found) >= 15
    for flags in found:
        words = without_files(shlex.split(flags))
        parse_run_config([word for word in words if word != "DIR"] if "DIR" not in words else words)


def test_their_side_of_a_migration_is_theirs() -> None:
    training = pytest.importorskip("transformers", reason="needs transformers").TrainingArguments
    known = {field.name for field in dataclasses.fields(training)}
    assert {name for name, _ in rows("trainer.md")} <= known
    launch = pytest.importorskip("accelerate.commands.launch", reason="needs accelerate")
    options = launch.launch_command_parser()._option_string_actions
    assert {name for name, _ in rows("accelerate.md")} <= options.keys()
    for name, _ in rows("deepspeed.md"):
        assert name in KEYS or name in SECTIONS or name in TOP, name


def test_cells_of_will_it_fit_are_those_of_todays_planner() -> None:
    for row in json.loads(RESULT.read_text(encoding="utf-8")):
        if (row["model"], row["gpu"]) == ("mistral-7b", "A100-80GB"):
            changes = CHOICES[row["gpus"]][row["choice"]]
            found = cell(row["model"], row["gpus"], row["choice"], changes, gpu_named(row["gpu"]))
            assert found.verdict == row["verdict"], found
            assert found.used_bytes == pytest.approx(row["used_bytes"], rel=0.02), found
