#!/usr/bin/env bash
# standins.sh: images that no registry gives on a machine without one, made from Debian's packages and the locks, under
# the names that Dockerfile and compose.yaml use. Only for engine.sh's private engine: they are not what their names say.
#   python:3.11-slim-bookworm   Debian's Python 3.11 and pip
#   vllm/vllm-openai:v0.32.0    the Dockerfile's cpu-base: vLLM's CPU build where the real one has CUDA and Python 3.12
#   redis:8-bookworm            Debian's redis-server (with the argument `redis`)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ ${DOCKER_HOST:-} == unix://${ENGINE_HOME:-/var/tmp/splint-engine}/* ]] || { echo "standins: run me with tools/containers/engine.sh" >&2; exit 78; }

python=python:3.11-slim-bookworm
base=vllm/vllm-openai:v0.32.0
redis=redis:8-bookworm
# A folder of the machine with wheels that the package index lacks (the CPU build of torch), where pip is set up with one.
wheels=${WHEELS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
certificates=/etc/ssl/certs/ca-certificates.crt

there() { docker image inspect "$1" >/dev/null 2>&1; }

mirror() { "$(dirname "${BASH_SOURCE[0]}")/engine.sh" --mirror; }

make_python() {
    mmdebstrap --quiet --mode=root --variant=minbase --include=python3,python3-pip,ca-certificates \
        --customize-hook="upload $certificates $certificates" \
        --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/archives/*' bookworm - "$(mirror)" |
        docker import -c "ENV PIP_CERT=$certificates SSL_CERT_FILE=$certificates PIP_BREAK_SYSTEM_PACKAGES=1" - "$python" >/dev/null
}

make_base() {
    docker build --quiet --network=host --target cpu-base --build-context wheels="${wheels:-$(mktemp -d)}" -t "$base" . >/dev/null
}

make_redis() {
    docker build --quiet --network=host -t "$redis" - >/dev/null <<EOF
FROM $python
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
CMD ["redis-server", "--protected-mode", "no"]
EOF
}

for image in python base ${1:-}; do
    there "${!image}" && continue
    started=$SECONDS
    "make_$image"
    echo "standins: ${!image} made in $((SECONDS - started)) s" >&2
done
