#!/usr/bin/env bash
# What a GPU machine without a network lacks, as wheels in build/gpu/wheels:
#     bench/gpu/prepare.sh
# The machine has Python 3.12 on x86_64, torch 2.11 with what torch brings, and NumPy. matplotlib is
# not among the wheels: benches leave out their plots where it is missing. Take the folder along with
# the repository; bench/gpu/plan.py installs from it, once.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}  # builds DeepSpeed's wheel, which asks for an installed torch
wheels=build/gpu/wheels
MOST_MIB=56  # small enough to be copied along with the sources

# Named one by one, because what they need would bring torch and CUDA along.
launcher=(tyro docstring-parser typeguard rich markdown-it-py mdurl pygments pyyaml psutil nvidia-ml-py safetensors
    tokenizers filelock tensorboard absl-py markdown protobuf werkzeug grpcio packaging)
deepspeed=(einops hjson msgpack ninja py-cpuinfo tqdm)
techniques=(torchao)
peers=(transformers huggingface-hub httpx2 httpcore2 h11 idna anyio truststore click
    regex accelerate lightning-fabric lightning-utilities)
tests=(pytest pytest-xdist execnet iniconfig pluggy)

rm -rf "$wheels"
mkdir -p "$wheels"
grep -v '^torch==' constraints.txt >build/gpu/constraints.txt
platforms=()
for glibc in 2_28 2_27 2_24 2_17 2014 2010 1; do # pip takes no older wheel for a newer system
    case $glibc in
    2_*) platforms+=(--platform "manylinux_${glibc}_x86_64") ;;
    *) platforms+=(--platform "manylinux${glibc}_x86_64") ;;
    esac
done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" \
    --python-version 3.12 --implementation cp "${platforms[@]}" \
    --constraint build/gpu/constraints.txt \
    "${launcher[@]}" "${deepspeed[@]}" "${techniques[@]}" "${peers[@]}" "${tests[@]}"
# With what it needs, since it asks for one version of pydantic-core.
"$python" -m pip download --quiet --only-binary=:all: --dest "$wheels" \
    --python-version 3.12 --implementation cp "${platforms[@]}" \
    --constraint build/gpu/constraints.txt pydantic
# Published as sources only. Its CUDA operators are compiled where they are used.
DS_BUILD_OPS=0 DS_BUILD_STRING="" "$python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$wheels" --constraint build/gpu/constraints.txt deepspeed

mib=$(du -sm "$wheels" | cut -f1)
du -ah "$wheels" | sort -h | tail -n 8
if [ "$mib" -gt "$MOST_MIB" ]; then
    echo "$wheels has $mib MiB, more than $MOST_MIB" >&2
    exit 1
fi
echo "$wheels: $mib MiB, $(find "$wheels" -name '*.whl' | wc -l) wheels"
