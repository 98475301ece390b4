#!/usr/bin/env bash
# Starts a script with ds_lgamp under the deepspeed launcher, on this node or on the nodes of a hostfile:
#
#     launch/deepspeed.sh [--dry-run] SCRIPT [ARGUMENTS...]
#
# With a hostfile, run it on one node. The launcher reaches the others over ssh without a password. --dry-run prints the
# command and starts nothing. Settings are environment variables:
#
#     HOSTFILE       nodes, one line "NAME slots=GPUS" for each (default: this node, unless there is a /job/hostfile)
#     GPUS_PER_NODE  ranks per node (default: the hostfile's slots, else the visible GPUs)
#     NNODES         number of nodes to use from the top of the hostfile (default: all)
#     MASTER_ADDR    with a hostfile: address of its first node for all others (default: the launcher asks the node)
#     MASTER_PORT    a free port there (default: one that is free here; this launcher does not support port 0)
#     RUN_OPTIONS    options of ds_lgamp run, such as "--cluster cluster.json" (default: none)
#
# The launcher ignores CUDA_VISIBLE_DEVICES if it gets a hostfile or a number of GPUs. launch/torchrun.sh respects it.

set -euo pipefail

refuse() {
    echo "deepspeed.sh: $1" >&2
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
[ $# -gt 0 ] || refuse "no script is given; use launch/deepspeed.sh [--dry-run] SCRIPT [ARGUMENTS...]"
[ -f "$1" ] || refuse "there is no script $1"
read -ra run_options <<<"${RUN_OPTIONS:-}"

command=(deepspeed)
gpus=${GPUS_PER_NODE:-}
if [ -n "${HOSTFILE:-}" ]; then
    [ -f "$HOSTFILE" ] || refuse "there is no hostfile $HOSTFILE; write one line NAME slots=GPUS for each node"
    command+=(--hostfile "$HOSTFILE")
    [ -z "${NNODES:-}" ] || command+=(--num_nodes "$NNODES")
    [ -z "${MASTER_ADDR:-}" ] || command+=(--master_addr "$MASTER_ADDR")
else
    [ "${NNODES:-1}" = 1 ] || refuse "NNODES is $NNODES, but HOSTFILE is not set; it names the nodes"
    # Without a number, the launcher takes the GPUs of CUDA_VISIBLE_DEVICES.
    if [ -z "$gpus${CUDA_VISIBLE_DEVICES:-}" ]; then
        gpus=$(python -c 'import torch; print(torch.cuda.device_count())' || echo 0)
    fi
fi
if [ -n "$gpus" ]; then
    [[ $gpus =~ ^[1-9][0-9]*$ ]] ||
        refuse "GPUS_PER_NODE is ${GPUS_PER_NODE:-not set and torch sees no GPU}; set it to the ranks per node, from 1"
    command+=(--num_gpus "$gpus")
fi
port=${MASTER_PORT:-$(python -c 'import socket
with socket.socket() as free:
    free.bind(("", 0))
    print(free.getsockname()[1])')}
command+=(--master_port "$port" --module ds_lgamp run ${run_options[@]+"${run_options[@]}"} "$@")

if $dry_run; then
    printf '%q' "${command[0]}" && printf ' %q' "${command[@]:1}" && echo
else
    exec "${command[@]}"
fi
