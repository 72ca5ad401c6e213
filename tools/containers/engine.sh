#!/usr/bin/env bash
# engine.sh COMMAND...: run COMMAND with a Docker engine, compose and buildx included, and leave nothing running behind.
#
# The engine is a private one of Debian packages, started as root: images get names in it that are not theirs (see
# standins.sh), so it is never the machine's own. That one and the firewall are left alone: no bridge, no NAT rule. So
# RUN steps that install packages need the host's network (`docker build --network=host`), and nothing is published
# beyond loopback. Inside a run of engine.sh, another one uses the same engine.
# Layers are kept in $ENGINE_HOME (default /var/tmp/splint-engine) for the next run; removing the folder frees the disk.
set -euo pipefail

home=${ENGINE_HOME:-/var/tmp/splint-engine}
# Bookworm's docker-compose is 1.29; the packages of the next release run on bookworm's own containerd and runc.
suite=trixie
packages=(docker.io docker-cli docker-compose docker-buildx)

die() { echo "engine: $*" >&2; exit 78; }

answers() { docker version >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }

mirror() { # of the machine's own sources, in either of apt's formats
    { find /etc/apt/sources.list /etc/apt/sources.list.d -type f -exec cat {} + 2>/dev/null || true; } |
        awk '/^URIs:.*debian/ {print $2} /^deb / {for (i = 2; i <= NF; i++) if ($i ~ /^https?:.*debian/) print $i}' |
        sed -n '/security/d; p; q'
}

install_host_packages() {
    local missing=()
    command -v containerd >/dev/null || missing+=(containerd)
    command -v runc >/dev/null || missing+=(runc)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
    ((${#missing[@]})) || return 0
    apt-get -qq -o DPkg::Lock::Timeout=300 update
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "${missing[@]}" >/dev/null
}

unpack_engine() { # beside the system, not into it
    [[ -x $home/pkg/usr/sbin/dockerd && -e $home/whole ]] && return 0
    rm -rf "$home/pkg" "$home/apt" "$home/debs"
    mkdir -p "$home"/{pkg,debs,apt/lists/partial,apt/cache/archives/partial}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) $suite main" >"$home/apt/sources.list"
    local options=(
        -qq -o APT::Sandbox::User=root -o Dir::Etc::sourcelist="$home/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::State::lists="$home/apt/lists" -o Dir::Cache="$home/apt/cache"
    )
    apt-get "${options[@]}" update
    (cd "$home/debs" && apt-get "${options[@]}" download "${packages[@]}")
    local deb
    for deb in "$home"/debs/*.deb; do dpkg -x "$deb" "$home/pkg"; done
    rm -rf "$home/debs" "$home/apt"
    touch "$home/whole"
}

write_gpu_stub() { # lets a container that reserves a GPU start: it proves wiring; there is no GPU in it
    mkdir -p "$home/bin"
    printf '#!/bin/sh\nexit 0\n' >"$home/bin/nvidia-container-runtime-hook"
    chmod +x "$home/bin/nvidia-container-runtime-hook"
}

start() {
    mkdir -p "$home"/{root,exec,cfg/cli-plugins}
    ln -sf "$home"/pkg/usr/libexec/docker/cli-plugins/* "$home/cfg/cli-plugins/"
    export DOCKER_HOST=unix://$home/docker.sock DOCKER_CONFIG=$home/cfg
    export PATH=$home/bin:$home/pkg/usr/sbin:$home/pkg/usr/bin:$PATH
    setsid dockerd --data-root "$home/root" --exec-root "$home/exec" -p "$home/docker.pid" -H "$DOCKER_HOST" \
        --bridge=none --iptables=false --ip6tables=false --ip-forward=false >"$home/dockerd.log" 2>&1 </dev/null &
    engine=$!
    local tries
    for ((tries = 0; tries < 150; tries++)); do
        answers && return 0
        kill -0 "$engine" 2>/dev/null || break
        sleep 0.2
    done
    tail -20 "$home/dockerd.log" >&2
    die "the Docker engine does not start; its log is $home/dockerd.log"
}

stop() {
    [[ -n ${engine:-} ]] || return 0
    docker ps -aq | xargs -r docker rm -f -v >/dev/null 2>&1 || true
    docker network prune -f >/dev/null 2>&1 || true
    docker volume prune -af >/dev/null 2>&1 || true
    kill "$engine" 2>/dev/null || true
    wait "$engine" 2>/dev/null || true
    umount "$home"/exec/netns/* "$home/root" 2>/dev/null || true
    local group
    for group in /sys/fs/cgroup/*/docker; do rmdir "$group/buildkit" "$group" 2>/dev/null || true; done
}

run() { # in the background, so that a signal is passed on at once
    "$@" &
    command=$!
    trap 'kill -INT "$command" 2>/dev/null' INT
    trap 'kill -TERM "$command" 2>/dev/null' TERM
    local code=0
    while kill -0 "$command" 2>/dev/null; do
        code=0
        wait "$command" || code=$?
    done
    return "$code"
}

main() {
    (($#)) || die "usage: engine.sh COMMAND..."
    [[ $1 != --mirror ]] || { mirror; return; }
    if [[ ${DOCKER_HOST:-} == unix://$home/docker.sock ]] && answers; then
        exec "$@"
    fi
    [[ $EUID == 0 ]] || die "only root can start a Docker engine of its own"
    command -v apt-get >/dev/null || die "the engine is made of Debian packages, and this is no Debian"
    mkdir -p "$home"
    exec 9>"$home/lock"
    flock -n 9 || { echo "engine: another run's engine is up; waiting for its end" >&2; flock 9; }
    install_host_packages
    unpack_engine
    write_gpu_stub
    trap stop EXIT
    start 9>&-
    echo "engine: Docker $(docker version -f '{{.Server.Version}}'), compose $(docker compose version --short)" >&2
    run "$@" 9>&-
}

main "$@"
