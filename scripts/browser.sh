#!/bin/sh
# Makes sure that a Chromium and its driver are there for tests/benchmarks/report/test_browser.py, which is skipped without them.
#
#   scripts/browser.sh
#
# Does nothing if they are found. Otherwise root on a system with apt-get installs Debian's packages.
set -eu

has() {
    command -v "$1" >/dev/null 2>&1
}

is_complete() {
    { has chromium || has chromium-browser || has google-chrome; } && has chromedriver
}

install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -qq --yes chromium chromium-driver
}

if is_complete; then
    exit 0
fi
if [ "$(id -u)" -eq 0 ] && has apt-get; then
    echo "Installing chromium and chromium-driver" >&2
    install >/dev/null || true
fi
is_complete || echo "No Chromium with chromedriver: the browser test will be skipped" >&2
