"""`shardscale recipe`: files of `--config` to begin with.

In: the name of one. Out: its text, which a user changes. Knows nothing of their fields.
"""
