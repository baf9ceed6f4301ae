"""Checks a build before setuptools makes it, and what a package index shows of README.md.

Everything else is in pyproject.toml.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINKS = ("launcher/model", "launcher/strategies/zero/ds_configs", "launcher/tools/submit/scripts")

# Git writes a link as a text file where links are off (its default on Windows), and setuptools
# would silently leave the folder behind it out of the wheel.
if broken := [link for link in LINKS if not (ROOT / link).is_dir()]:
    raise SystemExit(
        f"shardscale cannot be built: {', '.join(broken)} is not a folder, because this checkout "
        "has no symbolic links: run `git config core.symlinks true`, then `git checkout -- .`"
    )

# Files of a wheel carry a time: with a fixed one, the same sources make the same bytes.
os.environ.setdefault("SOURCE_DATE_EPOCH", "1767225600")  # 1 January 2026


def readme() -> str:
    """README.md without relative links and pictures, which lead nowhere on a package index.

    The paths stay in the text: the source distribution has these files.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(
        r"<picture>.*?</picture>\n*|!\[[^]]*\]\((?!https:)[^)]*\)\n*", "", text, flags=re.S
    )
    return re.sub(r"\[([^]]+)\]\((?!https:)([^)#]+)[^)]*\)", r"\1 (`\2`)", text)


setup(long_description=readme(), long_description_content_type="text/markdown")
