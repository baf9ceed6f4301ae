"""`shardscale doctor`: what will not work on this machine, and what to do about it."""

from launcher.doctor.cli import main

__all__ = ["main"]
