#!/usr/bin/env bash
# FlexAttention, fp8 and offload, and those GPU tests that compile. About 8 minutes.
. "$(dirname "$0")/part.sh"

seed=(--model seed-134m --micro-batch 125 --lr 5e-4)
run seed-flex-window64 120 "${seed[@]}" --precision bf16 --attention flex --window 64
run seed-flex-compile-selective 120 "${seed[@]}" --precision bf16 --attention flex --compile \
    --activation-checkpointing selective
run seed-fp8 120 "${seed[@]}" --precision fp8
run seed-fp8-compile 150 "${seed[@]}" --precision fp8 --compile
step tests 200 "$python" -m pytest -q ${SHORT:+--collect-only} \
    -n "$((2 * AT_ONCE))" -k "flex or compiled" tests/gpu

# NAME, then names of choices.
offload() {
    local name=$1
    shift
    step "$name" 200 "$python" bench/offload.py --rounds 1 --output "$results/$name" \
        --choices "$@"
}

offload offload-activations "single, full checkpointing" "single, activations in host memory"
offload offload-zero2 "zero2" "zero2, optimizer in host memory"
offload offload-zero3 "zero3" "zero3, optimizer in host memory"
offload offload-fsdp "fsdp" "fsdp, parameters and optimizer in host memory"
finish
