#!/usr/bin/env bash
# Every strategy over NCCL with one rank, checkpoints from one to another, the plan for pretended
# ranks, and the losses of every precision. About 8 minutes.
. "$(dirname "$0")/part.sh"

gpt2=(--model gpt2 --precision bf16 --micro-batch 8)
run gpt2-single 60 "${gpt2[@]}"
run gpt2-ddp 60 "${gpt2[@]}" --strategy ddp
run gpt2-fsdp 60 "${gpt2[@]}" --strategy fsdp
run gpt2-fsdp-compile 120 "${gpt2[@]}" --strategy fsdp --compile
for stage in 0 1 2 3; do
    run "gpt2-zero$stage" 60 "${gpt2[@]}" --zero "$stage"
done

# Half of the way under one strategy, the rest under another: losses as under one.
half=$((steps / 2))
nano=(--precision fp32)
run resume-single 60 "${nano[@]}"
run resume-from-zero3 60 "${nano[@]}" --zero 3 --stop-after "$half" --save-last
run resume-fsdp 60 "${nano[@]}" --strategy fsdp --resume "$results/resume-from-zero3/run"
run resume-from-fsdp 60 "${nano[@]}" --strategy fsdp --stop-after "$half" --save-last
run resume-zero2 60 "${nano[@]}" --zero 2 --resume "$results/resume-from-fsdp/run"

all=(fsdp-offload ddp fsdp-fp32 fsdp-bf16 fsdp-grad fsdp-hybrid fsdp-each zero1 zero2 zero3)
for cases in "${all[@]:0:$prediction_groups}"; do
    beside step "prediction-$cases" 200 "$python" bench/prediction.py --device cuda \
        --fake-ranks 8 --only "$cases" --output "$results/prediction-$cases"
done
wait
step precision 240 "$python" bench/precision.py --output "$results/precision" \
    --steps "$precision_steps"
finish
