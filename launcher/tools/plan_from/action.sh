#!/usr/bin/env bash
# Checks the configs of a repository with `plan --check`, writes the table to the job's summary and,
# for a pull request, as a comment. action.yml calls it; exit codes are those of `plan --check`.
set -u
checked="$(mktemp)" table="$(mktemp)"
trap 'rm -f "$checked" "$table"' EXIT
python="${PLAN_PYTHON:-python}"
# Paths and arguments are the workflow's own words, several with spaces between.
# shellcheck disable=SC2086
"$python" -m launcher plan --check --json --from ${PLAN_PATHS:-.} ${PLAN_ARGUMENTS:-} > "$checked"
code=$?
[ -s "$checked" ] || exit $code # refused, and said why
"$python" -m launcher.tools.plan_from.comment "$checked" > "$table" || exit
cat "$table" >> "${GITHUB_STEP_SUMMARY:-/dev/stdout}"
if [ "${PLAN_COMMENT:-false}" = true ] && [ -n "${PLAN_PULL_REQUEST:-}" ]; then
  gh pr comment "$PLAN_PULL_REQUEST" --edit-last --create-if-none --body-file "$table" \
    || echo "shardscale: no comment was written: does the job have pull-requests: write?" >&2
fi
exit $code
