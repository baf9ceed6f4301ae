"""Models in and out: `shardscale export` and `import`, in the form that transformers reads."""
