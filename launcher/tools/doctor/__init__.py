"""`shardscale doctor`: what will not work on this machine, and what to do about it."""
