"""`shardscale export` and `shardscale import`: between checkpoints and other libraries.

Run folders and checkpoints on one side; folders of transformers and PEFT, safetensors on the
other, through `launcher.checkpoint.pretrained`. Knows no ranks or strategies. Graphs and
engines (`export --format onnx|tensorrt`) are written by `launcher.tools.serve`, if present.
"""
