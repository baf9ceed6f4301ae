"""Tools of every wing: errors and exit codes, flags' types, sizes, files and locks, tables,
versions of packages, start-up of a process.

Knows nothing of training, and imports no torch.
"""
