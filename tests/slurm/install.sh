#!/bin/sh
# Installs what the tests on real Slurm need, where that is possible, and says why where it is not.
# Never an error: the tests skip themselves with a reason where Slurm is missing.
missing=
for program in slurmctld slurmd sbatch munged ip; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
[ -z "$missing" ] && exit 0

skip() {
    echo "tests/slurm: Slurm is not installed ($1), its tests will be skipped"
    exit 0
}

[ "$(id -u)" = 0 ] || skip "only root could install it"
command -v apt-get >/dev/null || skip "there is no apt-get"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# The tests start daemons of their own; RUNLEVEL=1 keeps the packages from starting theirs.
export RUNLEVEL=1
{
    apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge iproute2
} >"$log" 2>&1 || skip "apt-get failed: $(tail -n 1 "$log")"
