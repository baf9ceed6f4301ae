#!/bin/sh
# Installs the browser that looks at the report's page, where that is possible.
# Never an error: the test skips itself with a reason where there is no chromium.
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/browser: chromium is not installed (needs root and apt-get), its tests will be skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 ||
    echo "tests/browser: chromium could not be installed, its tests will be skipped"
