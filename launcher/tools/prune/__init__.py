"""`shardscale prune`: a trained model with fewer weights, as a run folder to train on from.

cli.py      the verb
choice.py   what is asked for, and what a model refuses of it
text.py     the text that importance is measured on, and perplexity
select.py   which weights go: one by one, or two of four
narrow.py   which heads or hidden units go, and the smaller model
kinds.py    what is left of each kind of weight, in zeros and bytes
folder.py   the run folder
"""
