"""`shardscale export` to the form that transformers reads, and `import` from it."""
