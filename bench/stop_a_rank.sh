#!/bin/bash
# A training whose rank 1 is stopped, so that rank 0 waits for it in a collective until the time-out:
# what docs/questions/nccl-timeout.md shows.
#   bash bench/stop_a_rank.sh FOLDER
torchrun --nproc 2 -m launcher.train --config bench/small.yaml --steps 100000 \
    --collective-timeout-s 10 --log-level warning --out "$1" &
agent=$!
until grep -qs '"kind": "step"' "$1/rank1.jsonl"; do
    kill -0 "$agent" || exit
    sleep 1
done
for rank in $(pgrep -P "$agent"); do
    grep -qz '^RANK=1$' "/proc/$rank/environ" && kill -STOP "$rank"
done
wait "$agent"
