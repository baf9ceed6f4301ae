# Sourced by every part: what the machine lacks is installed once, and each step leaves its results
# before the next one begins. A rented machine may be gone in between.
#
#   OUT      where <part>.tar.gz goes after every step (build/gpu/out)
#   PYTHON   an interpreter that has torch (python3)
#   SHORT=1  a rehearsal: only so many steps that every command has run
#
# Results are in build/gpu/results/<part>/<step>/; a step that has ended well is not run again, also
# where the folder was brought along from another machine.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
part=$(basename "$0" .sh)
results=build/gpu/results/$part
out=${OUT:-build/gpu/out}
site=$PWD/build/gpu/site
LONGEST_S=580     # of a command, which may take 10 minutes
LAST_START_S=480  # of a step
AT_ONCE=4         # steps whose times do not matter; cores are there for more

steps=40
precision_steps=100
prediction_groups=99 # all
patience=1
if [ -n "${SHORT:-}" ]; then
    steps=4
    precision_steps=4
    prediction_groups=1
    patience=10 # a machine without a GPU may have few cores
    LONGEST_S=100000
    LAST_START_S=$LONGEST_S
    AT_ONCE=1
fi

if [ ! -e "$site/complete" ] || [ build/gpu/wheels -nt "$site/complete" ]; then
    rm -rf "$site"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" \
        build/gpu/wheels/*.whl || exit 1
    touch "$site/complete"
fi
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH PYTHONUNBUFFERED=1
mkdir -p "$results" "$out"

# NAME SECONDS COMMAND...: its output, and what it writes, in $results/NAME.
step() {
    local name=$1 most_s=$(($2 * patience)) folder=$results/$1 began=$SECONDS code
    shift 2
    if [ -e "$folder/done" ]; then
        echo "== $name: done before"
        return
    fi
    if ((SECONDS > LAST_START_S)); then
        echo "== $name: left out, the time is over"
        return
    fi
    ((most_s > LONGEST_S - SECONDS)) && most_s=$((LONGEST_S - SECONDS))
    rm -rf "$folder"
    mkdir -p "$folder"
    timeout --kill-after=10 "$most_s" "$@" >"$folder/log.txt" 2>&1
    code=$?
    ((code == 0)) && touch "$folder/done"
    echo "== $name: exit code $code after $((SECONDS - began)) s"
    ((code == 0)) || tail -n 5 "$folder/log.txt"
    echo "$name $code $((SECONDS - began)) s" >>"$results/steps.txt"
    keep
}

# All results of the part so far, as one file that is never half.
keep() {
    (
        flock 9
        tar -czf "$out/$part.new" --exclude=checkpoints --exclude=tb -C build/gpu/results "$part"
        mv "$out/$part.new" "$out/$part.tar.gz"
    ) 9>"$results/.lock"
}

# NAME SECONDS FLAGS...: one training run on one GPU, of $steps steps, on bytes, since no tokenizer
# has to be trained for that.
run() {
    local name=$1 most_s=$2
    shift 2
    step "$name" "$most_s" "$python" -m launcher.torchrun --nproc 1 -m launcher.train \
        --steps "$steps" --tokenizer byte --test-batches 2 --no-save-last --no-tensorboard "$@" \
        --out "$results/$name/run"
}

# COMMAND...: not waited for, so no times may be read off it.
beside() {
    while (($(jobs -rp | wc -l) >= AT_ONCE)); do wait -n; done
    "$@" &
}

# The table of the part's runs.
finish() {
    wait
    "$python" bench/gpu/table.py "$results" | tee "$results/table.md"
    keep
    echo "$part: $SECONDS s"
}
