"""`shardscale sweep`: one training run per cell of a grid, in sequence or as tasks of a job array.

In: a grid from the command line or YAML (grid_source.py), expanded and checked first (grid.py).
Out: a folder (sweep_folder.py) with each cell's run, log and row, and a report. sweep.py runs the
cells in sequence, cell.py one of them in processes of its own; display.py shows progress. matrix.py
is `shardscale matrix`: the compatibility of techniques and strategies, from the same checks.
"""
