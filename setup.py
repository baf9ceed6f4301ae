"""Checks a build before setuptools makes it; everything else is in pyproject.toml."""

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
setup()
