"""Weights that others trained: folders of transformers and adapters of PEFT, read range by range.

In: a folder. Out: `Stored` weights that any strategy takes as it takes a checkpoint, and a
tokenizer. No rank holds the model.
"""
