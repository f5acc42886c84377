#!/usr/bin/env bash
# Resolves every *.in file again into a lock with hashes. UV_FIND_LINKS may name a folder of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

lock() {  # lock IN OUT PYTHON [uv options]
    local in=$1 out=$2 python=$3
    shift 3
    uv pip compile --quiet --generate-hashes --no-annotate --custom-compile-command "make lock" \
        --python-version "$python" "$in" --output-file "$out" "$@"
    echo "$out: $(grep -c '==' "$out") packages"
}

lock requirements/controller.in requirements/controller.txt 3.11 --universal
lock requirements/test.in requirements/test.txt 3.11 --universal
lock requirements/host.in requirements/host.txt 3.11 --universal
for stack in files/patches/*/; do
    # PyTorch's index is asked only for what the configured one does not have: torch+cpu.
    lock "${stack}requirements-cpu.in" "${stack}requirements-cpu.txt" 3.11 --override "${stack}overrides-cpu.txt" \
        --python-platform x86_64-manylinux_2_28 ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
    lock "${stack}requirements-cuda.in" "${stack}requirements-cuda.txt" 3.12 --python-platform x86_64-manylinux_2_28
done
