"""`shardscale rehearse`: run a program unchanged on GPUs that are not there.

In: a Python with torch's CUDA build, and GPUs of the table in measure/hardware.py. Out: the
environment in which any program of that Python sees these GPUs: torch's own allocator, streams and
choice of kernels, no kernels run. library/ holds the C sources, build.py compiles them,
null_gpu.py sets the environment. Must not know what the program does: no model, no strategy.
"""
