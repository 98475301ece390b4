#!/usr/bin/env bash
# Starts a script with ds_lgamp under torchrun's elastic agent. Where a rank or a node fails, all ranks start again, on
# the nodes that are left; nodes may join later. The script goes on from its newest checkpoint:
#
#     launch/elastic.sh [--dry-run] SCRIPT [ARGUMENTS...]
#
# On several nodes, run the same command on every node. --dry-run prints the command of this node and starts nothing.
# Settings are environment variables:
#
#     GPUS_PER_NODE  ranks per node (default: the GPUs that torch sees)
#     NNODES         the fewest and most nodes, such as 2:4 (default: 1)
#     RESTARTS       how often ranks that fail start again (default: 10)
#     GATHERING      seconds to wait for more nodes when there are enough (default: 30)
#     MASTER_ADDR    with several nodes: name or address of one of them, reachable from all others; it must not fail
#     MASTER_PORT    with several nodes: a free port there (default: 29500)
#     JOB_ID         with several nodes: a job name that is unique at that port (default: ds_lgamp)
#     RUN_OPTIONS    options of ds_lgamp run, such as "--cluster cluster.json" (default: none)
#
# The script must call load_checkpoint before it trains and save_checkpoint now and then. Its pipeline and
# tensor-parallel ranks must divide GPUS_PER_NODE. train_batch_size must suit every number of nodes.

set -euo pipefail

refuse() {
    echo "elastic.sh: $1" >&2
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
[ $# -gt 0 ] || refuse "no script is given; use launch/elastic.sh [--dry-run] SCRIPT [ARGUMENTS...]"
[ -f "$1" ] || refuse "there is no script $1"
read -ra run_options <<<"${RUN_OPTIONS:-}"

nodes=${NNODES:-1}
[[ $nodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || refuse "NNODES is $nodes; set it to the fewest and most nodes, as 2:4"
[ "${nodes%:*}" -le "${nodes#*:}" ] || refuse "NNODES is $nodes; the fewest nodes come first"
gpus=${GPUS_PER_NODE:-$(python -c 'import torch; print(torch.cuda.device_count())' || echo 0)}
[[ $gpus =~ ^[1-9][0-9]*$ ]] ||
    refuse "GPUS_PER_NODE is ${GPUS_PER_NODE:-not set and torch sees no GPU}; set it to the ranks per node, from 1"
restarts=${RESTARTS:-10} gathering=${GATHERING:-30}
[[ $restarts =~ ^[0-9]+$ ]] || refuse "RESTARTS is $restarts; set it to a number"
[[ $gathering =~ ^[1-9][0-9]*$ ]] || refuse "GATHERING is $gathering; set it to seconds, from 1"

command=(torchrun --max-restarts "$restarts")
if [ "$nodes" = 1 ]; then
    command+=(--standalone)
else
    [ -n "${MASTER_ADDR:-}" ] || refuse "MASTER_ADDR is not set; with $nodes nodes it names one that all others reach"
    command+=(--nnodes "$nodes" --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}")
    command+=(--rdzv_id "${JOB_ID:-ds_lgamp}" --rdzv_conf "last_call_timeout=$gathering")
    # Otherwise ranks that start again would find the addresses of those before them in the agents' store.
    command=(env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "${command[@]}")
fi
command+=(--nproc_per_node "$gpus" -m ds_lgamp run ${run_options[@]+"${run_options[@]}"} "$@")

if $dry_run; then
    printf '%q' "${command[0]}" && printf ' %q' "${command[@]:1}" && echo
else
    exec "${command[@]}"
fi
