"""Runs every command of docs/ and the README as it is written, and writes what it prints below it.

A fence of `sh` holds commands, one per line (or more, with a backslash). Those of a page are run in
order, in one folder of its own that has the repository's bench/, ds_configs/ and slurm/. A command
that says `(needs ...)` is not run; one that says `(exit code 3)` must end so, others with 0. A
fence of `text title="prints"` right below holds what they print, and of
`text title="prints, in part"` some of those lines. bench/results/docs_commands.json says which
commands have been run: tests/unit/house/test_docs.py holds docs/ against it.

    python bench/docs_commands.py [PAGE ...]        all pages take about half an hour on two cores
"""

import argparse
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
RECORD = ROOT / "bench" / "results" / "docs_commands.json"
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
BEFORE = re.compile(r"^<!-- before: (.*) -->$", re.MULTILINE)
ENDS_WITH = re.compile(r"\(exit code (\d)\)")
PRINTS, IN_PART = 'text title="prints"', 'text title="prints, in part"'
LONGEST_S = 1800
CACHE = Path(tempfile.gettempdir()) / f"docs-commands-{os.getuid()}"


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line of a page."""

    text: str
    hidden: bool = False
    """What a page takes for granted: run before its commands, in a comment of the page."""

    @property
    def is_run(self) -> bool:
        return "(needs " not in self.text and not self.text.startswith("make ")

    @property
    def exit_code(self) -> int:
        said = ENDS_WITH.search(self.text)
        return int(said[1]) if said else 0


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fence of commands, and where in the text the fence of their output has its lines."""

    commands: tuple[Command, ...]
    output: tuple[int, int] | None
    in_part: bool
    indent: str


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a page, in their order."""
    fences = list(FENCE.finditer(text))
    for fence, follower in zip_longest(fences, fences[1:]):
        if fence[2] != "sh":
            continue
        commands = tuple(Command(text=text) for text in lines_of(fence[3]))
        shown = follower is not None and follower[2] in (PRINTS, IN_PART)
        if follower is None or not shown or text[fence.end() : follower.start()].strip():
            yield Block(commands=commands, output=None, in_part=False, indent="")
        else:
            part = follower[2] == IN_PART
            yield Block(
                commands=commands, output=follower.span(3), in_part=part, indent=follower[1]
            )


def lines_of(block: str) -> Iterator[str]:
    """The command lines of a fence: a quotation or a backslash goes on in the next line."""
    text = ""
    for line in re.sub(r" *\\\n *", " ", block).splitlines():
        text += line.rstrip() if text == "" else f"\n{line}"
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # inside a quotation
            continue
        if words:
            yield text.strip()
        text = ""


def hidden_of(text: str) -> list[Command]:
    """Return the commands that a page takes for granted."""
    return [Command(text=said, hidden=True) for said in BEFORE.findall(text)]


def commands_of(page: Path) -> list[Command]:
    """All commands of a page."""
    text = page.read_text(encoding="utf-8")
    return [*hidden_of(text), *(each for block in blocks_of(text) for each in block.commands)]


def pages() -> list[Path]:
    """All pages that have commands."""
    return [page for page in (README, *sorted(DOCS.rglob("*.md"))) if commands_of(page)]


def name_of(page: Path) -> str:
    """The name of a page in the record."""
    return page.name if page == README else page.relative_to(DOCS).as_posix()


def expected() -> dict[str, dict[str, int]]:
    """Page -> command -> exit code, of all that are to be run: what the record must be."""
    named = {name_of(page): commands_of(page) for page in pages()}
    found = {
        name: {each.text: each.exit_code for each in commands if each.is_run}
        for name, commands in named.items()
    }
    return {name: ended for name, ended in found.items() if ended}


def run(command: Command, folder: Path) -> list[str]:
    """Run one command; the lines of its standard output.

    Raises:
        SystemExit: it has ended otherwise than the page says.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cache = {"SHARDSCALE_CACHE": str(CACHE)}  # no constants learnt on this machine
    plain = {"TERM": "dumb", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    # The verbs lay out their tables for a terminal; a training run would draw a bar in it.
    reader, writer = pty.openpty() if command.text.startswith("shardscale") else os.pipe()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            ["bash", "-c", command.text],
            cwd=folder,
            env=os.environ | {"PATH": path} | cache | plain,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=said,
        )
        os.close(writer)
        printed = b"".join(_chunks(reader))
        code = process.wait(LONGEST_S)
        if code != command.exit_code:
            said.seek(0)
            shown = (printed.decode(errors="replace") + said.read())[-3000:]
            sys.exit(f"{command.text}\nended with {code}, not {command.exit_code}\n{shown}")
    text = printed.decode().replace("\r", "").replace(f"{folder}/", "")
    return [line.rstrip() for line in text.splitlines()]


def _chunks(reader: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # a terminal that nobody writes to any more
            chunk = b""
        if not chunk:
            os.close(reader)
            return
        yield chunk


def in_part(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Today's wording of the lines that a page shows: those that begin with the same words.

    Raises:
        SystemExit: a line is not printed any more.
    """
    kept, left = [], list(printed)
    for line in shown:
        words = line.split()
        same = [
            number
            for count in (3, 2, 1)
            for number, other in enumerate(left)
            if words and other.split()[:count] == words[:count]
        ]
        if words and not same:
            sys.exit(f"not printed any more: {line}\n" + "\n".join(printed))
        if words:
            kept.append(left.pop(same[0]))
        else:
            kept.append("")
    return kept


def refresh(page: Path) -> dict[str, int]:
    """Run a page's commands and write their output into it; command -> exit code."""
    text = page.read_text(encoding="utf-8")
    ended: dict[str, int] = {}
    changes: list[tuple[int, int, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for outside in ("bench", "ds_configs", "slurm"):
            (folder / outside).symlink_to(ROOT / outside)
        for command in hidden_of(text):
            run(command, folder)
            ended[command.text] = command.exit_code
        for block in blocks_of(text):
            printed: list[str] = []
            for command in block.commands:
                if command.is_run:
                    print(f"  {command.text}", flush=True)
                    printed += run(command, folder)
                    ended[command.text] = command.exit_code
            if block.output is not None:
                start, end = block.output
                if block.in_part:
                    shown = [line.strip() for line in text[start:end].splitlines()]
                    printed = in_part(shown, printed)
                lines = "".join(f"{block.indent}{line}".rstrip() + "\n" for line in printed)
                changes.append((start, end, lines))
    for start, end, lines in reversed(changes):
        text = text[:start] + lines + text[end:]
    page.write_text(text, encoding="utf-8")
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="all that have commands if none")
    parser.add_argument("--behind", action="store_true", help="pages that have changed since")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    wanted = expected()
    record = {name: ended for name, ended in record.items() if name in wanted}
    asked = [page.resolve() for page in options.pages] or pages()
    for page in asked:
        name = name_of(page)
        if options.behind and record.get(name, {}) == wanted.get(name, {}):
            continue
        print(name, flush=True)
        if ended := refresh(page):
            record[name] = ended
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
