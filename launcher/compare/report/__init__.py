"""`shardscale report`: compare runs.

In: run folders and sweeps (find.py), of which nothing is trusted (runs.py, records.py, series.py).
Out: one plain structure (comparison.py), from which the console table, CSV, Markdown, JSON and the
page are written (output.py). columns.py declares every figure once; analysis.py computes figures
and loss differences, goals.py the winners. Knows records and names of variants, but nothing that
runs.
"""
