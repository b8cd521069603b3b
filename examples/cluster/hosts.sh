#!/usr/bin/env bash
# The same command on several hosts, over ssh; what each prints is kept in one folder:
#
#   HOSTS="a b" examples/cluster/hosts.sh crossrail bench p2p --size 1G                  a listens, b measures
#   HOSTS="a b" examples/cluster/hosts.sh crossrail bench ep --num-processes 8           eight ranks on each
#   HOSTS="a b" examples/cluster/hosts.sh crossrail bench ep --plan plan.json
#
# Each host is reached by ssh without a password, and has the program and this folder at the same paths. It gets RANK,
# WORLD_SIZE, MASTER_ADDR (ADDR, or the first host as named here) and MASTER_PORT (PORT), and this shell's CROSSRAIL_
# variables, which travel over ssh's stdin: no list of processes shows a secret. Several hosts need CROSSRAIL_SECRET or
# CROSSRAIL_SECRET_FILE. If one host fails, the others are ended. LOGS: the folder, crossrail-logs without it.
set -euo pipefail

read -ra hosts <<<"${HOSTS:?the hosts, as in HOSTS=\"a b\"}"
(($# > 0)) || { echo "usage: HOSTS=\"a b\" $0 COMMAND..." >&2; exit 2; }
logs=${LOGS:-crossrail-logs}
mkdir -p "$logs"
gate=$(mktemp -u "$logs/.open.XXXXXX")
mkfifo -m 600 "$gate"
trap 'rm -f "$gate"' EXIT

# What a host runs. The command is ended when stdin ends, which it does with this script.
script() {
    local name
    printf 'export RANK=%q WORLD_SIZE=%q LOCAL_RANK=0 LOCAL_WORLD_SIZE=1' "$1" "${#hosts[@]}"
    printf ' MASTER_ADDR=%q MASTER_PORT=%q' "${ADDR:-${hosts[0]##*@}}" "${PORT:-29500}"
    for name in $(compgen -e CROSSRAIL_ || true); do printf ' %s=%q' "$name" "${!name}"; done
    printf '\n{ cd %q || exit; exec 3<&0; ' "$PWD"
    printf '%q ' "${@:2}"
    printf '</dev/null 3<&- & pid=$!; { cat <&3 >/dev/null; kill "$pid"; } 2>/dev/null & watch=$!; '
    printf 'wait "$pid"; code=$?; kill "$watch"; exit "$code"; }\n'
}

declare -A rank_of=()
for rank in "${!hosts[@]}"; do
    ssh -T -o BatchMode=yes "${hosts[rank]}" bash -s < <(script "$rank" "$@"; exec cat "$gate") \
        >"$logs/$rank-${hosts[rank]##*@}.log" 2>&1 &
    rank_of[$!]=$rank
done
exec {open}>"$gate" # the hosts' stdin ends with this descriptor

status=0
while ((${#rank_of[@]})); do
    code=0
    wait -n -p ended "${!rank_of[@]}" || code=$?
    rank=${rank_of[$ended]}
    unset "rank_of[$ended]"
    if ((code && !status)); then
        status=$code
        echo "${hosts[rank]} (rank $rank) failed with exit code $code; the others are ended" >&2
        exec {open}>&-
    fi
done
for rank in "${!hosts[@]}"; do
    log=$logs/$rank-${hosts[rank]##*@}.log
    printf '\n== %s, rank %s (%s)\n' "${hosts[rank]}" "$rank" "$log"
    cat "$log"
done
exit "$status"
