"""Models in and out: `memscale export` and `memscale import`, in the form transformers reads."""
