"""`shardscale completion SHELL`: print a script that completes verbs, flags and their values.

It is generated from the --help of each verb, so that completing starts no Python.
"""

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence

from launcher.__main__ import VERBS
from launcher.util.errors import ExitCode

SHELLS = ("bash", "zsh", "fish")
TAKES_TRAINING_FLAGS = ("plan", "run", "sweep", "submit")

Flags = dict[str, list[str]]
"""Flag -> its choices; empty if any value is valid."""


def main(argv: Sequence[str]) -> int:
    """Print the script; returns an exit code."""
    how = "for example: shardscale completion bash >> ~/.bashrc"
    if list(argv) in (["-h"], ["--help"]):
        print(f"usage: shardscale completion {{{','.join(SHELLS)}}}\n\nPrint the script; {how}")
        return ExitCode.DONE
    if len(argv) != 1 or argv[0] not in SHELLS:
        given = " ".join(argv) or "nothing"
        print(
            f"shardscale: completion {given!r}: give one of {', '.join(SHELLS)}; {how}",
            file=sys.stderr,
        )
        return ExitCode.REFUSED
    flags = {verb: _flags_of(verb) for verb in VERBS}
    for verb in TAKES_TRAINING_FLAGS:
        flags[verb] = flags["train"] | flags[verb]
    print(_fish(flags) if argv[0] == "fish" else _bash(flags, zsh=argv[0] == "zsh"))
    return ExitCode.DONE


def _flags_of(verb: str) -> Flags:
    """Parse a verb's help, so that no flag is declared twice."""
    help_text = io.StringIO()
    before = os.environ.copy()
    os.environ["COLUMNS"] = "80"  # in wider help, tyro puts two flags on one line
    try:
        with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
            if verb == "train":
                importlib.import_module("launcher.config.arguments").parse_run_config(["--help"])
            else:
                importlib.import_module(VERBS[verb][0]).main(["--help"])
    finally:
        del os.environ["COLUMNS"]
        os.environ.update(before)
    found: Flags = {}
    # Lines with deeper indentation are explanations, which mention flags too.
    for line in re.findall(r"^[│ ] {,3}(-.*)", help_text.getvalue(), re.MULTILINE):
        head = re.split(r"  |: ", line)[0]
        values = re.search(r"\{([\w.,|-]+)\}", head)
        words = [word for word in re.split(r"[,|]", values[1]) if word != "None"] if values else []
        for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", head):
            found[name] = words
    return found


def _bash(flags: dict[str, Flags], *, zsh: bool) -> str:
    cases = [
        f"    '{verb} {flag}') words='{' '.join(values)}' ;;"
        for verb, known in flags.items()
        for flag, values in known.items()
        if values
    ]
    verbs = "\n".join(
        f"      {verb}) words='{' '.join(known)}' ;;" for verb, known in flags.items() if known
    )
    lines = ["autoload -U +X compinit bashcompinit && compinit && bashcompinit"] if zsh else []
    lines += [
        "_shardscale() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=",
        f"  if [ $COMP_CWORD -eq 1 ]; then words='{' '.join(VERBS)} --help --version'; else",
        '  case "${COMP_WORDS[1]} $previous" in',
        *cases,
        "    *) case ${COMP_WORDS[1]} in",
        verbs,
        f"      completion) words='{' '.join(SHELLS)}' ;;",
        "    esac ;;",
        "  esac; fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _shardscale shardscale",
    ]
    return "\n".join(lines)


def _fish(flags: dict[str, Flags]) -> str:
    lines = [
        f"complete -c shardscale -n __fish_use_subcommand -fa {verb} -d '{what}'"
        for verb, (_, what) in VERBS.items()
    ]
    within = "complete -c shardscale -n '__fish_seen_subcommand_from {}'"
    lines.append(f"{within.format('completion')} -fa '{' '.join(SHELLS)}'")
    for verb, known in flags.items():
        for flag, values in known.items():
            choices = f" -xa '{' '.join(values)}'" if values else ""
            lines.append(f"{within.format(verb)} -l {flag[2:]}{choices}")
    return "\n".join(lines)
