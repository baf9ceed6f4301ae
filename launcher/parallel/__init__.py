"""This process among the ranks, and its decoder over shards of sequences or matrices.

In: the environment of torchrun or Slurm, and the sizes of the mesh. Out: a `World`, a `Mesh`, and
the decoder of one rank (`ModelParallel.decoder`). Knows no strategies; they shard what it builds.
"""
