#!/usr/bin/env bash
# Everything that needs a GPU, in one command: bench/gpu.sh [RESULTS_DIR]
# The GPU tests, every strategy at world size 1 on NCCL in bf16, and the study's model at batch 125;
# then one table of peaks (allocated, reserved, device) and step times; last, the benches of the
# memory techniques: the study's cells and ours, every precision's losses, offload.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${1:-bench/results/gpu}
runs=$(mktemp -d)
mkdir -p "$results"
export PYTHONUNBUFFERED=1

python -m pytest tests/gpu -q 2>&1 | tee "$results/pytest.txt"
nvidia-smi >"$results/nvidia-smi.txt"

train() { # name, then flags
    local name=$1
    shift
    echo "== $name"
    timeout 300 python -m launcher.torchrun --nproc 1 -m launcher.train "$@" --out "$runs/$name" ||
        echo "$name ended with $?"
}

for strategy in "--strategy single" "--strategy ddp" "--strategy fsdp" \
    "--zero 1" "--zero 2" "--zero 3"; do
    name=$(echo "$strategy" | tr -d -- '- ' | sed 's/^strategy//')
    # ZeRO needs DeepSpeed, which a GPU machine may not have: then its rows say so.
    # shellcheck disable=SC2086
    train "gpt2-bf16-$name" $strategy --model gpt2 --precision bf16 --micro-batch 8 --steps 20
done

study=(--model seed-134m --micro-batch 125 --lr 5e-4 --steps 40 --strategy single)
train seed-fp32 "${study[@]}" --precision fp32
train seed-bf16 "${study[@]}" --precision bf16
train seed-fp32-checkpointing "${study[@]}" --precision fp32 --activation-checkpointing full
train seed-bf16-checkpointing "${study[@]}" --precision bf16 --activation-checkpointing full

python bench/gpu_table.py "$runs" | tee "$results/table.md"

# The techniques at full size; each refuses to write over earlier results.
python bench/study.py --output "$results/study"
python bench/study.py --cells peak --output "$results/peak"
python bench/precision.py --output "$results"
python bench/offload.py --output "$results"

# Needs the bench extra; a peer that is not installed is a row that says so.
python bench/peers.py --size full --output "$results/peers"

cp -r "$runs"/* "$results"/ 2>/dev/null
find "$results" -name tb -type d -prune -exec rm -rf {} +
