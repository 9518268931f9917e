#!/bin/sh
# Prepare .venv for `make quickstart` (base), `make test` (dev) or `make test-gpu` (gpu); see tools/make_env.py.
set -u
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null 2>&1; then
    echo "megamoe: no '$python' found; install Python 3.10 or newer, or pass PYTHON=/path/to/python" >&2
    exit 1
fi
exec "$python" "$(dirname "$0")/make_env.py" "$@"
