"""`shardscale snapshot FILE`: a memory snapshot of torch as a table and a page.

In comes a pickle of `torch.cuda.memory._dump_snapshot`, of any program; out go the timeline by
phase, the contents of the peak, lifetimes and fragmentation. It knows nothing of runs, imports no
torch and executes nothing that a file asks for.
"""
