#!/bin/sh
# Installs what DeepSpeed's asynchronous I/O is built with, where that is possible, and says why
# where it is not. Never an error: the tests skip themselves with a reason where it is missing.
compiles() {
    echo 'int main() { return 0; }' | c++ -include libaio.h -x c++ - -laio -o /dev/null 2>/dev/null
}
compiles && exit 0

skip() {
    echo "tests/offload: libaio or g++ is not installed ($1), tests on NVMe offload will be skipped"
    exit 0
}

[ "$(id -u)" = 0 ] || skip "only root could install it"
command -v apt-get >/dev/null || skip "there is no apt-get"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
{
    apt-get update && apt-get install -y --no-install-recommends g++ libaio-dev
} >"$log" 2>&1 || skip "apt-get failed: $(tail -n 1 "$log")"
