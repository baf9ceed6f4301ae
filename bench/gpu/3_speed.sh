#!/usr/bin/env bash
# Seconds: the machine's own rates, and the study's cells over an epoch each. About 8 minutes.
. "$(dirname "$0")/part.sh"

step profile 120 "$python" -m launcher profile --out "$results/profile/machine.json"
study=(flash bf16 fp32 fp32-checkpointing bf16-compile bf16-pure-compile bf16-selective
    flash-window64 bf16-largest-batch flash-largest-batch fp32-checkpointing-largest-batch
    bf16-pure-full-in-backward)
for cell in "${study[@]}"; do
    step "study-$cell" 150 "$python" bench/study.py --cells "$cell" ${SHORT:+--steps "$steps"} \
        --output "$results/study-$cell/study"
done
finish
