#!/usr/bin/env bash
# Inference on the GPU: PyTorch as it is, compiled, and TensorRT where the machine's Python has it and
# the packages of the extra `onnx` (neither is among the wheels). About 6 minutes.
. "$(dirname "$0")/part.sh"

run gpt2-trained 60 --model gpt2 --precision bf16 --micro-batch 8 --save-last
step inference-gpt2 200 "$python" bench/inference.py "$results/gpt2-trained/run" --device cuda \
    --output "$results/inference-gpt2/table"
step inference-llama 200 "$python" bench/inference.py --device cuda \
    --output "$results/inference-llama/table"
step tests 100 "$python" -m pytest -q ${SHORT:+--collect-only} tests/gpu/test_inference.py
finish
