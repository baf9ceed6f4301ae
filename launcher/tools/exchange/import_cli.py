"""`shardscale import`: turn a model of transformers, or an adapter of PEFT, into a run folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import options_of
from launcher.util.startup import loading


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """Import a model of transformers, or an adapter of PEFT, as a run folder to train from."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A folder written by save_pretrained of transformers or PEFT, or hf:ORG/NAME."""
    out: Path
    """Run folder to write; must not exist yet."""


@refusing
def main(argv: Sequence[str]) -> int:
    """Import one model; 0 on success, 2 when refused."""
    options = options_of(ImportOptions, argv, "shardscale import")
    with loading():
        from launcher.tools.exchange.import_ import import_model

    print(import_model(options.folder, options.out))
    return ExitCode.DONE
