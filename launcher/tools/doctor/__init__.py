"""`shardscale doctor`: what will not work on this machine, and how to fix it.

In: this machine. Out: findings (finding.py), on the console or as JSON. gpu.py, host.py and
software.py hold the checks, doctor_cli.py lists them. Starts no training and changes nothing.
"""
