"""`shardscale completion SHELL`: print a script that completes verbs, flags and their values, for
`shardscale` and for `torchrun -m launcher.train`.

It is generated from the --help of each verb, so that completing starts no Python.
"""

import contextlib
import importlib
import io
import os
import re
import typing
from collections.abc import Sequence

from launcher.__main__ import VERBS
from launcher.config.help_lines import LINES
from launcher.config.help_text import choices
from launcher.config.schema import field_types
from launcher.util.errors import ExitCode, tell
from launcher.util.flags import flag

SHELLS = ("bash", "zsh", "fish")
TAKES_TRAINING_FLAGS = ("plan", "run", "sweep", "submit")
TORCHRUN, TRAINER = "torchrun", "launcher.train"

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
        tell(f"completion {given!r}: give one of {', '.join(SHELLS)}; {how}")
        return ExitCode.REFUSED
    flags = all_flags()
    print(_fish(flags) if argv[0] == "fish" else _bash(flags, zsh=argv[0] == "zsh"))
    return ExitCode.DONE


def all_flags() -> dict[str, Flags]:
    """Return the flags of each verb, and torchrun's own."""
    flags = {verb: _flags_of(verb) for verb in VERBS}
    flags[TORCHRUN] = flags["run"]
    for verb in TAKES_TRAINING_FLAGS:
        flags[verb] = flags["train"] | flags[verb]
    return flags


def _training_flags() -> Flags:
    found: Flags = {"--config": [], "--help": [*LINES, "all"]}
    for name, kind in field_types().items():
        found[flag(name)] = choices(name)
        if bool in (kind, *typing.get_args(kind)):
            found[flag(f"no_{name}")] = []
    return found


def _flags_of(verb: str) -> Flags:
    """Return the flags of a verb, parsed from its help, so that none is declared twice."""
    if verb == "train":
        return _training_flags()
    help_text = io.StringIO()
    before = os.environ.copy()
    os.environ["COLUMNS"] = "80"  # in wider help, tyro puts two flags on one line
    try:
        with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
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
        f"    '{verb} {name}') words='{' '.join(values)}' ;;"
        for verb, known in flags.items()
        for name, values in known.items()
        if values
    ]
    verbs = "\n".join(
        f"      {verb}) words='{' '.join(known)}' ;;" for verb, known in flags.items() if known
    )
    lines = ["autoload -U +X compinit bashcompinit && compinit && bashcompinit"] if zsh else []
    lines += [
        "_shardscale() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=",
        "  local verb=${COMP_WORDS[1]}",
        '  case "${COMP_WORDS[0]##*/} ${COMP_WORDS[*]:1:COMP_CWORD-1} " in',
        f'    "{TORCHRUN} "*" {TRAINER} "*) verb=train ;;',
        f'    "{TORCHRUN} "*) verb={TORCHRUN} ;;',
        "  esac",
        f"  if [ $COMP_CWORD -eq 1 ] && [ $verb != {TORCHRUN} ]; then",
        f"    words='{' '.join(VERBS)} --help --version'; else",
        '  case "$verb $previous" in',
        *cases,
        "    *) case $verb in",
        verbs,
        f"      completion) words='{' '.join(SHELLS)}' ;;",
        "    esac ;;",
        "  esac; fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        f"complete -o default -F _shardscale shardscale {TORCHRUN}",
    ]
    return "\n".join(lines)


def _fish(flags: dict[str, Flags]) -> str:
    lines = [
        f'complete -c shardscale -n __fish_use_subcommand -fa {verb} -d "{what}"'
        for verb, (_, what) in VERBS.items()
    ]
    within = "complete -c shardscale -n '__fish_seen_subcommand_from {}'"
    lines.append(f"{within.format('completion')} -fa '{' '.join(SHELLS)}'")
    training = f"string match -q '* {TRAINER} *' (commandline -pc)"
    for verb, known in flags.items():
        if verb == TORCHRUN:
            start, known = f'complete -c {TORCHRUN} -n "{training}"', flags["train"]
        else:
            start = within.format(verb)
        for name, values in known.items():
            choices = f" -xa '{' '.join(values)}'" if values else ""
            lines.append(f"{start} -l {name[2:]}{choices}")
    return "\n".join(lines)
