"""Who this process is among the ranks, and the decoder over shards of sequences or matrices.

In: the environment of torchrun or Slurm, and the sizes of the mesh. Out: a `World`, a `Mesh`, and
the decoder of one rank (`ModelParallel.decoder`). Knows no strategies; they shard what it builds.
"""
