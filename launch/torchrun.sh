#!/usr/bin/env bash
# Starts a script with ds_lgamp under torchrun, on one node or on several:
#
#     launch/torchrun.sh [--dry-run] SCRIPT [ARGUMENTS...]
#
# On several nodes, run the same command on every node. --dry-run prints the command of this node and starts nothing.
# Settings are environment variables:
#
#     GPUS_PER_NODE  ranks per node (default: the GPUs that torch sees)
#     NNODES         number of nodes (default: 1)
#     MASTER_ADDR    with several nodes: name or address of one of them, reachable from all others
#     MASTER_PORT    with several nodes: a free port there (default: 29500)
#     JOB_ID         with several nodes: a job name that is unique at that port (default: ds_lgamp)
#     NODE_RANK      with several nodes: this node's number, 0 on MASTER_ADDR (default: torchrun numbers the nodes)
#     RUN_OPTIONS    options of ds_lgamp run, such as "--cluster cluster.json" (default: none)

set -euo pipefail

refuse() {
    echo "torchrun.sh: $1" >&2
    exit 2
}

dry_run=false
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=true ;;
        --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
        --) shift && break ;;
        -*) refuse "$1 is no option; the script comes first, then its own options" ;;
        *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || refuse "no script is given; use launch/torchrun.sh [--dry-run] SCRIPT [ARGUMENTS...]"
[ -f "$1" ] || refuse "there is no script $1"
read -ra run_options <<<"${RUN_OPTIONS:-}"

nodes=${NNODES:-1}
[[ $nodes =~ ^[1-9][0-9]*$ ]] || refuse "NNODES is $nodes; set it to the number of nodes, from 1"
gpus=${GPUS_PER_NODE:-$(python -c 'import torch; print(torch.cuda.device_count())' || echo 0)}
[[ $gpus =~ ^[1-9][0-9]*$ ]] ||
    refuse "GPUS_PER_NODE is ${GPUS_PER_NODE:-not set and torch sees no GPU}; set it to the ranks per node, from 1"

command=(torchrun)
if [ "$nodes" = 1 ]; then
    command+=(--standalone)
else
    [ -n "${MASTER_ADDR:-}" ] || refuse "MASTER_ADDR is not set; with $nodes nodes it names one that all others reach"
    port=${MASTER_PORT:-29500}
    command+=(--nnodes "$nodes")
    if [ -n "${NODE_RANK:-}" ]; then
        command+=(--node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$port")
    else
        command+=(--rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$port" --rdzv_id "${JOB_ID:-ds_lgamp}")
    fi
fi
command+=(--nproc_per_node "$gpus" -m ds_lgamp run ${run_options[@]+"${run_options[@]}"} "$@")

if $dry_run; then
    printf '%q' "${command[0]}" && printf ' %q' "${command[@]:1}" && echo
else
    exec "${command[@]}"
fi
