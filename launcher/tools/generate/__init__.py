"""`shardscale generate`: text from trained weights.

In: a run, a checkpoint, an export or a folder of transformers, through
`launcher.checkpoint.pretrained`. Out: text on a terminal, JSON lines to a pipe. Knows no ranks,
strategies or training state. The cache and the choice of tokens are `launcher.model.decode` and
`launcher.run.sampling`.
"""
