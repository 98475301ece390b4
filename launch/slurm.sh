#!/usr/bin/env bash
# Starts a script with ds_lgamp as a Slurm job, with torchrun on every node:
#
#     sbatch launch/slurm.sh SCRIPT [ARGUMENTS...]
#
# Options of sbatch before launch/slurm.sh take precedence over the header below: sbatch --nodes 4 launch/slurm.sh ...
# Activate the Python environment first; the job inherits it. Inside an allocation, launch/slurm.sh --dry-run SCRIPT ...
# prints the srun command and starts nothing. Environment variables override Slurm's values:
#
#     GPUS_PER_NODE  ranks per node (default: the GPUs that Slurm gave this node)
#     MASTER_ADDR    a node that all others can reach (default: the job's first node)
#     MASTER_PORT    a free port there (default: 20000 plus the job number modulo 10000)
#     RUN_OPTIONS    options of ds_lgamp run, such as "--cluster cluster.json" (default: none)

#SBATCH --job-name=ds_lgamp
# Nodes and their GPUs. Each GPU gets one rank.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
# One task per node. It is torchrun, which starts the ranks.
#SBATCH --ntasks-per-node=1
# All cores and all memory of the nodes.
#SBATCH --exclusive
#SBATCH --mem=0
# Name and number of the job.
#SBATCH --output=%x-%j.out
# Do not restart the job after a node has failed.
#SBATCH --no-requeue

set -euo pipefail

refuse() {
    echo "slurm.sh: $1" >&2
    exit 2
}

# Prints the first node of a list such as gpu[03-05,9],login. Parses the list itself if there is no scontrol.
first_node() {
    local names
    if command -v scontrol >/dev/null; then
        names=$(scontrol show hostnames "$1")
        echo "${names%%$'\n'*}"
    else
        sed -E 's/^([^],[]*)(\[([^],-]+)[^]]*\])?([^],[]*).*/\1\3\4/' <<<"$1"
    fi
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
[ $# -gt 0 ] || refuse "no script is given; use sbatch launch/slurm.sh SCRIPT [ARGUMENTS...]"
[ -f "$1" ] || refuse "there is no script $1"
read -ra run_options <<<"${RUN_OPTIONS:-}"

node_list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}}
[ -n "$node_list" ] || refuse "SLURM_JOB_NODELIST is not set; submit with sbatch launch/slurm.sh SCRIPT [ARGUMENTS...]"
nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}
[[ $gpus =~ ^[1-9][0-9]*$ ]] ||
    refuse "GPUS_PER_NODE is ${GPUS_PER_NODE:-not set and Slurm gave no GPU}; set it to the ranks per node, from 1"
job=${SLURM_JOB_ID:-0}
address=${MASTER_ADDR:-$(first_node "$node_list")}
port=${MASTER_PORT:-$((20000 + job % 10000))}

command=(srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1)
# srun does not inherit this number since Slurm 22.05.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || command+=(--cpus-per-task "$SLURM_CPUS_PER_TASK")
command+=(torchrun --nnodes "$nodes" --rdzv_backend c10d --rdzv_endpoint "$address:$port" --rdzv_id "$job")
command+=(--nproc_per_node "$gpus" -m ds_lgamp run ${run_options[@]+"${run_options[@]}"} "$@")

if $dry_run; then
    printf '%q' "${command[0]}" && printf ' %q' "${command[@]:1}" && echo
else
    exec "${command[@]}"
fi
