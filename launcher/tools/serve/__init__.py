"""Other runtimes for trained models: ONNX graphs, TensorRT engines, and `shardscale infer-bench`.

In: a checkpoint through `launcher.checkpoint.pretrained`. Out: graph or engine files for
`export --format onnx|tensorrt`, and a table of memory, latency and perplexity per runtime. Knows no
training state, ranks or strategies, and no other tool.

infer_bench.py  the verb's work; each case runs in a process of its own (case.py)
engines.py      the runtimes that it compares, as functions from tokens to logits
export.py       the formats, called by `shardscale export`; check.py compares them with PyTorch
graph.py        the decoder as an ONNX graph, which runtime.py runs; tensorrt.py builds engines
"""
