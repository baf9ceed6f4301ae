#!/usr/bin/env bash
# Chromium for the page's test, Slurm for tests/slurm. Needs root and apt; says so where it cannot.
set -uo pipefail
wanted=()
command -v chromium >/dev/null || wanted+=(chromium)
command -v slurmctld >/dev/null || wanted+=(slurm-wlm)
command -v munged >/dev/null || wanted+=(munge)
command -v ip >/dev/null || wanted+=(iproute2)
if [ ${#wanted[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed (needs root and apt): ${wanted[*]}; the tests that need them are skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null ||
    echo "could not install ${wanted[*]}; the tests that need them are skipped"
