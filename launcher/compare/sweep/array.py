"""A sweep whose cells run on other machines, at the same time: prepared here, a task for each cell.

python -m launcher sweep --prepare --nproc 4 --out sweeps/first --grid strategy=ddp,zero3
python -m launcher sweep --out sweeps/first --cell 1
"""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.compare.sweep.cell import run_cell, stop_in_order
from launcher.compare.sweep.display import outcome
from launcher.compare.sweep.folder import Row, SweepFolder, rows_of
from launcher.compare.sweep.grid import Cell, cells_of, flags_given
from launcher.compare.sweep.grid_source import flags_of
from launcher.compare.sweep.options import default_folder, grid_of, parse_options
from launcher.config.arguments import parse_run_config
from launcher.data import sources
from launcher.errors import ExitCode, UserError
from launcher.run.lifecycle import Interrupted


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A sweep that has nothing left to refuse, and is not written yet."""

    folder: SweepFolder
    rows: list[Row]
    nproc: int
    arguments: list[str]

    def tasks(self) -> str:
        """The cells that can run, as sbatch's --array wants them: `0,1,3`."""
        return ",".join(str(i) for i, row in enumerate(self.rows) if not row.done)

    def write(self) -> None:
        """Make the sweep's folder, with every cell as it stands.

        Raises:
            UserError: it cannot be made.
        """
        self.folder.create()
        self.folder.write(self.rows, nproc=self.nproc, arguments=self.arguments)


def prepare(argv: Sequence[str]) -> Prepared:
    """Check all cells for machines that are not this one: on GPUs, unless with --device cpu.

    Raises:
        UserError: whatever a cell's job would refuse; a folder that is taken.
    """
    options, training = parse_options(argv)
    folder = SweepFolder(options.out or default_folder())
    if folder.read() is not None:
        raise UserError(f"--out {folder.path} holds a sweep already: choose another folder")
    if options.nproc is None:
        raise UserError("how many processes has each cell? give --nproc 4, for example")
    typed, configured = flags_given(training)
    cells = cells_of(
        grid_of(options, configured),
        typed,
        nproc=options.nproc,
        choose_device=lambda wanted, ranks: "cpu" if wanted == "cpu" else "cuda",
    )
    checked = [_with_source(cell) for cell in cells]
    if all(cell.state for cell in checked):
        first = next((cell for cell in checked if cell.state == "refused"), checked[0])
        raise UserError(f"no cell of this sweep can run; {first.name}: {first.reason}")
    rows = rows_of(checked, None, nproc=options.nproc)
    return Prepared(folder=folder, rows=rows, nproc=options.nproc, arguments=list(argv))


def run_task(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the cell that `--cell` numbers; 0 when it is done, 4 when not, 5 when it was stopped.

    Raises:
        UserError: there is no such cell, or more than --out is asked for.
    """
    asked = {token.partition("=")[0] for token in argv if token.startswith("--")}
    if asked != {"--out", "--cell"}:
        raise UserError("--cell runs a cell as it was prepared: give --out, and nothing else")
    folder = SweepFolder(options.out)
    row, prepared = folder.read_cell(options.cell)
    folder.catch_up(row)
    where = f"cell {options.cell} of {folder.path}, {row.cell.name}"
    if row.done:
        print(f"{where}: {outcome(row)} (kept)")
        return ExitCode.DONE
    as_prepared, _ = parse_options(prepared["arguments"])
    print(f"{where}: started; it logs to {folder.log(row.cell.name)}", flush=True)
    stop_in_order()
    with contextlib.suppress(Interrupted):
        run_cell(
            row,
            folder,
            nproc=prepared["nproc"],
            timeout_s=60 * as_prepared.timeout_minutes,
            tick=lambda: None,
        )
    print(f"{where}: {outcome(row)}", flush=True)
    if row.state in ("preempted", "interrupted"):
        return ExitCode.PREEMPTED
    return ExitCode.DONE if row.done else ExitCode.FAILED


def _with_source(cell: Cell) -> Cell:
    """The cell, refused if its data are not there; its job will read them."""
    if cell.state is None:
        try:
            data = parse_run_config(flags_of(cell.flags)).data
            sources.resolve(data.data, data.data_field, data.stream_bytes)
        except UserError as error:
            return Cell(name=cell.name, flags=cell.flags, state="refused", reason=str(error))
    return cell
