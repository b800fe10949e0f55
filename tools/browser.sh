#!/usr/bin/env bash
# Installs Chromium for the tests of the HTML report, unless a Chromium or Chrome is there already.
set -euo pipefail
for name in chromium chromium-browser google-chrome chrome; do
  if command -v "$name" > /dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null
else
  "$1/playwright" install chromium
fi
