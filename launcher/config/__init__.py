"""Flags and YAML in, a resolved run out.

schema.py declares every flag once, arguments.py reads them, resolve.py fills in what was left open,
rules/ holds every refusal of a combination. Knows neither ranks nor engines: a config is resolved
on any machine, for any number of GPUs.
"""
