#!/usr/bin/env bash
# Does it run at all? And the headline: seed-134m at batch 125 x 256. About 7 minutes.
. "$(dirname "$0")/part.sh"

nvidia-smi >"$results/nvidia-smi.txt"
"$python" -m pip list >"$results/packages.txt" 2>/dev/null
step doctor 60 "$python" -m launcher doctor
run nano 60

seed=(--model seed-134m --micro-batch 125 --lr 5e-4 --precision bf16)
run seed-auto 60 "${seed[@]}"
run seed-flash 60 "${seed[@]}" --attention flash
run seed-selective 60 "${seed[@]}" --activation-checkpointing selective
run seed-full 60 "${seed[@]}" --activation-checkpointing full
run seed-chunk4096 60 "${seed[@]}" --loss-chunk 4096
run seed-fsdp 60 "${seed[@]}" --strategy fsdp
run seed-fsdp-compile-selective 120 "${seed[@]}" --strategy fsdp --compile \
    --activation-checkpointing selective
step seed-operators 90 "$python" bench/gpu/operators.py "$results/seed-operators" "${seed[@]}"
run seed-3500 90 "${seed[@]}" --micro-batch 3500 --memory-limit 48GiB \
    --precision bf16-pure --optimizer adamw8bit --activation-checkpointing full

# Losses against nano-single's, in fp32: bf16's rounding would hide mistakes.
beside run nano-single 90 --precision fp32
beside run nano-ddp 90 --precision fp32 --strategy ddp
beside run nano-fsdp 90 --precision fp32 --strategy fsdp
beside run nano-fsdp-grad-op 90 --precision fp32 --strategy fsdp --no-reshard-after-forward
for stage in 0 1 2 3; do
    beside run "nano-zero$stage" 90 --precision fp32 --zero "$stage"
done
wait
step tests 240 "$python" -m pytest -q ${SHORT:+--collect-only} \
    -n "$((2 * AT_ONCE))" -k "not flex and not compiled" tests/gpu
finish
