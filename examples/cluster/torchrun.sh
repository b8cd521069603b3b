#!/usr/bin/env bash
# On every node: NODES=2 NODE=0 HEAD=10.0.0.1 examples/cluster/torchrun.sh (NODE=1 on the second). Alone: without any.
# Several nodes need the same CROSSRAIL_SECRET_FILE.
set -euo pipefail

crossrail info
exec torchrun --nnodes "${NODES:-1}" --node-rank "${NODE:-0}" --nproc-per-node "${RANKS:-2}" \
    --master-addr "${HEAD:-127.0.0.1}" --master-port "${PORT:-29500}" "$(dirname "$0")/exchange.py"
