#!/usr/bin/env bash
# examples/cluster/openmpi.sh                         two ranks here
# HOSTS=a:4,b:4 RANKS=8 examples/cluster/openmpi.sh   eight on two machines, which need the same CROSSRAIL_SECRET_FILE
set -euo pipefail

where=()
if [[ -n ${HOSTS:-} ]]; then
    first=${HOSTS%%,*}
    where=(--host "$HOSTS" -x "MASTER_ADDR=${first%%:*}" -x CROSSRAIL_SECRET_FILE)
fi
crossrail info
exec mpirun -n "${RANKS:-2}" "${where[@]}" ${MPIRUN_OPTIONS:-} "${PYTHON:-python3}" "$(dirname "$0")/exchange.py"
