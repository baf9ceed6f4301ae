"""`shardscale prune`: a trained model with fewer weights, as a run folder to train further.

In: a checkpoint or a folder of transformers, and its text. Out: a run folder whose step 0 holds the
pruned weights (and their masks), and pruning.json. Knows no ranks, strategies or optimizer states.

prune_cli.py  the verb, without torch; prune.py does its work
choice.py     options, and checks of a model against them
text.py       calibration norms and perplexity
weights.py    which weights, heads or units go
kinds.py      sparsity and bytes per kind of weight
folder.py     the run folder
"""
