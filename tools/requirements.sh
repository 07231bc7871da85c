#!/bin/sh
# Writes requirements/*.txt: every dependency pinned with its hashes, without any registry's address.
set -eu
cd "$(dirname "$0")/.."
compile() { uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate "$@"; }
printf 'uv\n' | compile - -o requirements/uv.txt
printf 'scikit-build-core>=0.11\nnvidia-cuda-runtime>=13.0,<13.1\nninja\ncmake>=3.25\n' | compile - -o requirements/build.txt
compile pyproject.toml -o requirements/run.txt
compile pyproject.toml --extra postgres --extra test --extra lint -c requirements/run.txt -o requirements/test.txt
