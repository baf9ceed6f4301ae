#!/usr/bin/env bash
# Bytes: plan, caching allocator and what the device says is used; table.py --beside puts those of a
# rehearsal next to them. About 7 minutes.
. "$(dirname "$0")/part.sh"

seed=(--model seed-134m --micro-batch 125 --lr 5e-4)
steps=4 # the third one's peak is all others'
step plan 120 "$python" -m launcher plan --gpus 1 --gpu H200 --model seed-134m --seq-len 256 \
    --micro-batch 125 --no-calibration --quiet --all --json "$results/plan/plan.json"

# One after the other: what the device says is used is everybody's.
run seed-fp32 60 "${seed[@]}" --precision fp32
run seed-bf16 60 "${seed[@]}" --precision bf16
run seed-bf16-eager 60 "${seed[@]}" --precision bf16 --attention eager
run seed-bf16-whole-logits 60 "${seed[@]}" --precision bf16 --loss-chunk 0
run seed-bf16-segments 60 "${seed[@]}" --precision bf16 --no-expandable-segments
run seed-bf16-selective 60 "${seed[@]}" --precision bf16 --activation-checkpointing selective
run seed-bf16-full 60 "${seed[@]}" --precision bf16 --activation-checkpointing full
run seed-bf16-offload 60 "${seed[@]}" --precision bf16 --activation-checkpointing offload
run seed-bf16-compile 120 "${seed[@]}" --precision bf16 --compile
run seed-bf16-adamw8bit 60 "${seed[@]}" --precision bf16 --optimizer adamw8bit
run seed-pure 60 "${seed[@]}" --precision bf16-pure
run seed-pure-least 60 "${seed[@]}" --precision bf16-pure --optimizer adamw8bit \
    --activation-checkpointing full --optimizer-in-backward --clip 0
run seed-fsdp 60 "${seed[@]}" --precision bf16 --strategy fsdp
for stage in 1 2 3; do
    run "seed-zero$stage" 60 "${seed[@]}" --precision bf16 --zero "$stage"
done
run seed-auto-48GiB 180 --model seed-134m --micro-batch auto --precision bf16 --memory-limit 48GiB

# Each case against the allocator, in one process per name.
all=(single ddp fsdp-fp32 fsdp-bf16 fsdp-grad fsdp-each fsdp-offload zero0 zero1 zero2 zero3)
for cases in "${all[@]:0:$prediction_groups}"; do
    beside step "prediction-$cases" 200 "$python" bench/prediction.py --device cuda \
        --fake-ranks 1 --only "$cases" --output "$results/prediction-$cases"
done
finish
