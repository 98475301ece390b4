#!/usr/bin/env bash
# Trains a small Megatron-core GPT on the documentation of Python twice and compares the runs: on stock DeepSpeed (1F1B,
# ZeRO-1) and with a ds_lgamp block (layered, modular, ZeRO-3). Both start from the same weights on 2 pipeline x 2
# data-parallel ranks. Uses 4 GPUs if the machine has them, else the CPU. Passes flags on to launch/pretrain_gpt.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/install.sh
install_ds_lgamp megatron,transformers,plot

runs=runs/quickstart
if [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -lt 4 ]; then
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore

# What an earlier start has recorded is not of these runs.
rm -rf "$runs/trace" "$runs/index.html"
python launch/prepare_data.py --output-prefix data/pydoc
for name in stock lgamp; do
    # The page shows steps with ds_lgamp. Stock DeepSpeed records none.
    trace=
    if [ $name = lgamp ]; then
        trace="--trace $runs/trace"
    fi
    echo "== $name: example_configs/quickstart_$name.json"
    # shellcheck disable=SC2086
    python -m torch.distributed.run --standalone --nproc_per_node 4 -m ds_lgamp run --measure "$runs/$name.json" $trace \
        launch/pretrain_gpt.py --deepspeed_config "example_configs/quickstart_$name.json" \
        --pipeline-model-parallel-size 2 --data-path data/pydoc --position-embedding-type rope \
        --hidden-dropout 0 --attention-dropout 0 --train-iters 80 --eval-interval 40 --log-interval 10 "$@"
done
python -m benchmarks.quickstart "$runs"
