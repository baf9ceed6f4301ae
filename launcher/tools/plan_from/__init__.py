"""`shardscale plan --from`: plan the run that a config file of another trainer describes.

In: a file of a trainer in `kinds/`.
Out: our words for its keys, the ledger and verdict of that run, changes in the file's own words.

reading.py   a file's text -> flat keys      kinds/        one table of keys per trainer
engines.py   how each trainer's bytes differ translate.py  keys -> flags of a training
assess.py    flags -> ledger and verdict     changes.py    edits of the file that would fit

Knows the planner; no trainer is imported.
"""
