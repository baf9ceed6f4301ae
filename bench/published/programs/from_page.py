"""Run the example of a page: its Python block that has MARK, with each OLD replaced by NEW.

    python from_page.py PAGE MARK FILE [OLD=>NEW ...]

FILE keeps the example, for the processes that it starts.
"""

import itertools
import re
import runpy
import sys
import textwrap
from pathlib import Path

page, mark, file, *replacements = sys.argv[1:]
blocks = re.split(r"(?m)^ *\.\. code-block:: python\n", Path(page).read_text(encoding="utf-8"))[1:]
block = next(block for block in blocks if mark in block)
indent = re.findall(r"(?m)^( +)\S", block)[0]
lines = itertools.takewhile(
    lambda line: not line.strip() or line.startswith(indent), block.splitlines()
)
program = textwrap.dedent("\n".join(lines))
for replacement in replacements:
    old, _, new = replacement.partition("=>")
    program = program.replace(old, new)
Path(file).write_text(program, encoding="utf-8")
sys.argv = [file]
runpy.run_path(file, run_name="__main__")
