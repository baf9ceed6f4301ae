#!/usr/bin/env bash
# transformers' GPT-2 under accelerate, Lightning Fabric and DeepSpeed, step by step in turn with
# ours. About 7 minutes.
. "$(dirname "$0")/part.sh"

about=(--size full)
if [ -n "${SHORT:-}" ]; then
    # Lightning Fabric wants the norm of the gradients to be a number, which no kernel computes.
    about=(--size small --steps 6 --peers accelerate accelerate-fused-gelu
        deepspeed-zero2 deepspeed-zero3)
fi

# NAME, then what peers.py takes.
peers() {
    local name=$1
    shift
    step "$name" 150 "$python" bench/peers.py "${about[@]}" --output "$results/$name/peers" "$@"
}

peers single-bf16 --cases single --precisions bf16 --flags defaults selective
peers single-bf16-compile --cases single --precisions bf16 --flags compile
peers single-bf16-both-compile --cases single --precisions bf16 --flags both-compile
peers zero2-bf16 --cases zero2 --precisions bf16 --flags defaults
peers zero3-bf16 --cases zero3 --precisions bf16 --flags defaults
peers single-fp32 --cases single --precisions fp32 --flags defaults selective
finish
