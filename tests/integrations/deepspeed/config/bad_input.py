"""Invalid blocks and configurations, each with the sentence that refuses it."""

NULL = object()
"""Stands for null. None removes a key."""
BASE = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}

BLOCKS = {
    "pipeline ranks beside a PipelineModule": (
        {"pipeline_ranks": 2},
        "ds_lgamp.pipeline_ranks is 2, but the PipelineModule has num_stages 2; remove pipeline_ranks",
    ),
    "a list at which to split a PipelineModule": (
        {"blocks": "layers"},
        "ds_lgamp.blocks is set, but a PipelineModule says what its layers are; remove it",
    ),
    "dummy inputs beside a PipelineModule": (
        {"dummy_inputs": {}},
        "ds_lgamp.dummy_inputs is set, but a PipelineModule",
    ),
    "a typo": ({"resident_chunk": 2}, "ds_lgamp.resident_chunk is no known key; did you mean resident_chunks?"),
    "text for a number": ({"resident_chunks": "2"}, "ds_lgamp.resident_chunks is '2': input should be a valid integer"),
    "no resident chunk": ({"resident_chunks": 0}, "ds_lgamp.resident_chunks is 0: input should be greater than 0"),
    "an unknown schedule": ({"schedule": "zb1"}, "ds_lgamp.schedule is 'zb1': input should be 'layered'"),
    "an unknown placement": ({"placement": "looped"}, "ds_lgamp.placement is 'looped': input should be 'modular'"),
    "an unknown recomputation": ({"recompute": "half"}, "ds_lgamp.recompute is 'half': input should be 'full'"),
    "a recomputation nobody offers": (
        {"recompute": "selective"},
        "ds_lgamp.recompute is 'selective', but no layer of the model offers it; give layers an attribute",
    ),
    "rounding that depends on the pipeline ranks": (
        {"activation_dtype": "fp8", "reproducible": True},
        "activation_dtype is 'fp8', which rounds where pipeline ranks meet, but reproducible promises the same bits",
    ),
    "an unknown type of activations": (
        {"activation_dtype": "int8"},
        "ds_lgamp.activation_dtype is 'int8': input should be 'bf16' or 'fp8'",
    ),
    "a group of no micro-batch": ({"micro_batch_group": 0}, "ds_lgamp.micro_batch_group is 0"),
    "enabled as text": ({"enabled": "yes"}, "ds_lgamp.enabled is 'yes': input should be a valid boolean"),
    "no object": ("layered", "ds_lgamp is 'layered'; it must be an object"),
    "only the loss of a model inside": (
        {"model": "encoder", "outputs": "loss"},
        "outputs is 'loss', but the code around model computes the loss of its outputs; use 'all', or remove outputs",
    ),
    "two cuts": ({"chunks_per_rank": 2, "layers_per_chunk": 1}, "both cut the layers; keep one of them"),
    "chunks with 1f1b": (
        {"schedule": "1f1b", "chunks_per_rank": 2},
        "chunks_per_rank is 2, but schedule '1f1b' has one",
    ),
    "cuts with gpipe": ({"schedule": "gpipe", "layers_per_chunk": 1}, "layers_per_chunk is 1, but schedule 'gpipe'"),
    "groups with gpipe": (
        {"schedule": "gpipe", "micro_batch_group": 1},
        "micro_batch_group is 1, but groups belong",
    ),
    "interleaved on contiguous": (
        {"schedule": "interleaved_1f1b", "placement": "contiguous"},
        "placement is 'contiguous', but schedule 'interleaved_1f1b' needs 'modular'; remove it",
    ),
    "three chunks with zbv": (
        {"schedule": "zbv", "chunks_per_rank": 3},
        "chunks_per_rank is 3, but schedule 'zbv' has two chunks per pipeline rank, placed as a vee; remove chunks_per",
    ),
    "chunks that do not interleave": (
        {"schedule": "interleaved_1f1b", "layers_per_chunk": 2},
        "ds_lgamp.layers_per_chunk is 2, which cuts 5 layers into 3 chunks, but schedule 'interleaved_1f1b' needs a mu",
    ),
    "more ranks than chunks": ({"layers_per_chunk": 5}, "ds_lgamp.layers_per_chunk is 5, which cuts 5 layers into 1"),
    "a speed of nothing": (
        {"pipeline_rank_speeds": [1, 0]},
        "ds_lgamp.pipeline_rank_speeds[1] is 0: input should be greater than 0",
    ),
    "a speed as text": (
        {"data_rank_speeds": ["2"]},
        "ds_lgamp.data_rank_speeds[0] is '2': input should be a valid numb",
    ),
    "a speed for all": ({"data_rank_speeds": 2}, "ds_lgamp.data_rank_speeds is 2: input should be a valid list"),
    "too many pipeline speeds": (
        {"pipeline_rank_speeds": [3, 2, 1]},
        "ds_lgamp.pipeline_rank_speeds is [3.0, 2.0, 1.0], 3 speeds for 2 pipeline ranks; give one for each rank",
    ),
    "too many data-parallel speeds": (
        {"data_rank_speeds": [2, 1]},
        "ds_lgamp.data_rank_speeds is [2.0, 1.0], 2 speeds for 1 data-parallel ranks; give one for each rank",
    ),
    "two sizes of chunks": (
        {"pipeline_rank_speeds": [2, 1], "layers_per_chunk": 1},
        "pipeline_rank_speeds and layers_per_chunk both size the chunks; keep one of them, or set chunks_per_rank",
    ),
    "more chunks by speed than layers": (
        {"pipeline_rank_speeds": [2, 1], "chunks_per_rank": 3},
        "ds_lgamp.chunks_per_rank is 3: with pipeline_rank_speeds, 2 pipeline ranks would need 6 layers of the most fr",
    ),
    "more chunks than layers": ({"chunks_per_rank": 4}, "ds_lgamp.chunks_per_rank is 4: 2 pipeline ranks would need 8"),
}

RATE = {"type": "SGD", "params": {"lr": 0.1}}
CONFIGS = {
    "a misspelt block": ({"ds_lgamp": None, "ds-lgamp": {}}, "ds-lgamp is no known key; did you mean ds_lgamp?"),
    "another misspelt block": ({"ds_lgamp": None, "DS_LGMAP": {}}, "DS_LGMAP is no known key; did you mean ds_lgamp?"),
    "a scheduler's typo": (
        {"optimizer": RATE, "scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}},
        "scheduler.params is {'warmup': 3}, but WarmupLR refuses it (TypeError: ",
    ),
    "an unknown scheduler": (
        {"optimizer": RATE, "scheduler": {"type": "Warmup", "params": {}}},
        "scheduler.type is 'Warmup', which is unknown; use LRRangeTest",
    ),
    "a scheduler without parameters": (
        {"optimizer": RATE, "scheduler": {"type": "WarmupLR"}},
        "scheduler.params is missing; write an object such as {}",
    ),
    "an optimizer's typo": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentun": 0.9}}},
        "optimizer.params is {'lr': 0.1, 'momentun': 0.9}, but SGD refuses it (TypeError: ",
    ),
    "a negative learning rate": (
        {"optimizer": {"type": "AdamW", "params": {"lr": -1.0, "torch_adam": True}}},
        "but adamw refuses it (ValueError: Invalid learning rate: -1.0)",
    ),
    "clipping in the optimizer": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm is 1.0, which DeepSpeed refuses; write gradient_clipping instead",
    ),
    "a breakdown that is never printed": ({"wall_clock_breakdown": True}, "but steps_per_print is missing; write how"),
    "printing every 0 steps": ({"steps_per_print": 0}, "steps_per_print is 0; write a whole number from 1"),
    "clipping as text": ({"gradient_clipping": "1.0"}, "gradient_clipping is '1.0'; write a number from 0"),
    "negative clipping": ({"gradient_clipping": -1}, "gradient_clipping is -1; write a number from 0"),
    "a stage as text": ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage is '3'; write 0, 1, 2 or 3"),
    "bf16 as text": ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes'; write true or false"),
    "an unknown log level": ({"log_level": "loud"}, "log_level is 'loud', but ds_lgamp takes debug, info, warning"),
    "a section that is null": ({"checkpoint": NULL}, "checkpoint is None; it must be an object such as {}"),
    "what DeepSpeed refuses": ({"data_types": {"keep_in_fp32_modules": 3}}, "refuses the configuration: DeepSpeedConf"),
    "micro-batches that do not interleave": (
        {"ds_lgamp": {"schedule": "interleaved_1f1b", "chunks_per_rank": 2}, "gradient_accumulation_steps": 3},
        "ds_lgamp.schedule is 'interleaved_1f1b', which needs a multiple of 2 (pipeline ranks) micro-batches, but a ba",
    ),
    "batch sizes that do not multiply": (
        {"train_batch_size": 9},
        "train_batch_size is 9, which is not 4 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps)",
    ),
    "a batch that micro-batches do not divide": (
        {"train_batch_size": 9, "gradient_accumulation_steps": None},
        "train_batch_size is 9, which is no multiple of 4 (train_micro_batch_size_per_gpu) x 1 (data-parallel ranks)",
    ),
    "no batch size": (
        {"train_micro_batch_size_per_gpu": None},
        "train_batch_size and train_micro_batch_size_per_gpu are missing; write at least one of them",
    ),
    "a batch size as text": (
        {"gradient_accumulation_steps": "2"},
        "gradient_accumulation_steps is '2'; write a whole number from 1",
    ),
    "a batch of nothing": ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu is 0; write a whole"),
    "a typo at the top": (
        {"gradient_acumulation_steps": 2},
        "gradient_acumulation_steps is no known key; did you mean gradient_accumulation_steps?",
    ),
    "a typo in a section": (
        {"zero_optimization": {"stagee": 3}},
        "zero_optimization.stagee is no known key; did you mean stage? Or remove it",
    ),
    "the block in a section": (
        {"zero_optimization": {"stage": 3, "ds_lgamp": {}}},
        "zero_optimization.ds_lgamp is the block in the wrong place; it stands at the top",
    ),
    "a value left to a trainer": ({"gradient_clipping": "auto"}, 'gradient_clipping is "auto"'),
    "a section that is a number": ({"zero_optimization": 3}, "zero_optimization is 3; it must be an object"),
    "a stage that does not exist": (
        {"zero_optimization": {"stage": 4}},
        "stage is 4; write 0, 1, 2 or 3",
    ),
    "fp16 where the device has none": (
        {"fp16": {"enabled": True}},
        "fp16.enabled is True, but DeepSpeed says that this device (cpu) has no fp16; use bf16 or remove it",
    ),
    "two precisions": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled and bf16.enabled are True; set one of them to false",
    ),
    "LAMB with a fixed loss scale": (
        {"fp16": {"loss_scale": 256}, "optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
        "fp16.loss_scale is 256, but DeepSpeed takes optimizer.type Lamb with a dynamic loss scale only; set it to 0",
    ),
    "a negative loss scale": ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale is -1; write a number from 0"),
    "master weights in fp16": (
        {"fp16": {"fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads is True: the optimizer updates fp32 copies of the parameters; remove it",
    ),
    "parameters of another type than the precision": (
        {"data_types": {"param_dtype": "half"}},
        "data_types.param_dtype is 'half', but fp16.enabled and bf16.enabled make parameters torch.float32; change one",
    ),
    "autocast": ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is True"),
    "accumulation in integers": ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype is 'int8'"),
    "sums instead of means": ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is 'sum'"),
    "reductions in integers": ({"communication_data_type": "int8"}, "communication_data_type is 'int8', but ds_lgamp"),
    "an optimizer on the host at stage 0": (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device is 'cpu', but zero_optimization.stage is 0; use stage 1, 2 or 3",
    ),
    "parameters on the host at stage 2": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device is 'cpu', but zero_optimization.stage is 2; use stage 3, or remove it",
    ),
    "parameters on the host without the optimizer": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device is 'cpu', but zero_optimization.offload_optimizer.device is 'none'",
    ),
    "parameters on a tape": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}},
        "zero_optimization.offload_param.device is 'tape', but ds_lgamp takes cpu or nvme (with offload_optimizer) or",
    ),
    "parameters on a disk without the optimizer": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
        "zero_optimization.offload_param.device is 'nvme', but zero_optimization.offload_optimizer.device is 'none'",
    ),
    "a disk without a path": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        "zero_optimization.offload_optimizer.device is 'nvme', but zero_optimization.offload_optimizer.nvme_path is "
        "missing; write a folder on the disk",
    ),
    "a path that is no name": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": 3}}},
        "zero_optimization.offload_optimizer.nvme_path is 3; write a name in quotes",
    ),
    "two disks": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
                "offload_param": {"device": "nvme", "nvme_path": "/var"},
            }
        },
        "zero_optimization.offload_optimizer.nvme_path is '/tmp' and zero_optimization.offload_param.nvme_path is "
        "'/var'; write one folder for both",
    ),
    "a folder that is none": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}},
        "zero_optimization.offload_optimizer.nvme_path is '/nowhere', which is no folder on this machine; create it",
    ),
    "inputs on a disk without a path": (
        {"ds_lgamp": {"offload_activations": "nvme"}},
        "ds_lgamp.offload_activations is 'nvme', but ds_lgamp.nvme_path is missing; write a folder on the disk",
    ),
    "hidden states of 16 bits in 16 bits": (
        {"ds_lgamp": {"activation_dtype": "bf16"}, "bf16": {"enabled": True}},
        "ds_lgamp.activation_dtype is 'bf16', but under bf16 hidden states have 16 bits already; use 'fp8', or remove",
    ),
    "frozen weights that stay below stage 3": (
        {"ds_lgamp": {"keep_frozen": "host"}, "zero_optimization": {"stage": 2}},
        "ds_lgamp.keep_frozen is 'host', but zero_optimization.stage is 2, where every rank has all weights",
    ),
    "gathered weights on the host below stage 3": (
        {"ds_lgamp": {"regather": "host"}, "zero_optimization": {"stage": 2}},
        "ds_lgamp.regather is 'host', but zero_optimization.stage is 2, which gathers no chunk twice in a step; use",
    ),
    "frozen weights in two places": (
        {
            "ds_lgamp": {"keep_frozen": "device"},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        },
        "ds_lgamp.keep_frozen is 'device', but zero_optimization.offload_param.device is 'cpu', which says where",
    ),
    "a path without a disk": (
        {"ds_lgamp": {"offload_activations": "cpu", "nvme_path": "/tmp"}},
        "nvme_path is '/tmp', but offload_activations is 'cpu'; use 'nvme', or remove nvme_path",
    ),
    "an optimizer of whole tensors on a disk": (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
            "optimizer": {"type": "Muon", "params": {"lr": 0.1}},
        },
        "zero_optimization.offload_optimizer.device is 'nvme', but Muon steps on all tensors of a rank",
    ),
    "nothing on the host": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0}}},
        "zero_optimization.offload_optimizer.ratio is 0, which leaves nothing to the host; remove offload_optimizer",
    ),
    "a larger part on the host than chunks allow": (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.9}},
            "ds_lgamp": {"chunks_per_rank": 2},
        },
        "zero_optimization.offload_optimizer.ratio is 0.9, but whole chunks stay on the device, and no rank has more "
        "than 2; use at most 0.5, or remove it",
    ),
    "shards of nodes on the host": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zero_hpz_partition_size": 2,
            }
        },
        "offload_optimizer.device is 'cpu' and zero_optimization.zero_hpz_partition_size is 2, but shards of nodes",
    ),
    "an optimizer of whole tensors on the host": (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "Muon", "params": {"lr": 0.1}},
        },
        "offload_optimizer.device is 'cpu', but Muon steps on all tensors of a rank together; remove ",
    ),
    "rounded weights below stage 3": (
        {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
        "zero_optimization.zero_quantized_weights is true, but zero_optimization.stage is 2; use stage 3",
    ),
    "rounded frozen weights below stage 3": (
        {"zero_optimization": {"stage": 1, "zero_quantized_nontrainable_weights": True}},
        "zero_quantized_nontrainable_weights is true, but zero_optimization.stage is 1; use stage 3",
    ),
    "rounded gradients at stage 0": (
        {"zero_optimization": {"stage": 0, "zero_quantized_gradients": True}},
        "zero_quantized_gradients is true, but zero_optimization.stage is 0; use stage 1, 2 or 3",
    ),
    "rounded weights as text": (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": "yes"}},
        "zero_optimization.zero_quantized_weights is 'yes'; write true or false",
    ),
    "rounding inside nodes": (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}},
        "zero_quantized_gradients is true, but zero_optimization.zero_hpz_partition_size keeps shards in nodes",
    ),
    "rounded, but reproducible": (
        {
            "ds_lgamp": {"reproducible": True},
            "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
        },
        "zero_quantized_weights is true, but ds_lgamp.reproducible promises the same bits in every layout; remove one",
    ),
    "gradients that travel in two ways": (
        {"communication_data_type": "bf16", "zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
        "zero_quantized_gradients is true, but communication_data_type says how gradients travel, too; remove one",
    ),
    "rounded frozen weights that stay": (
        {
            "ds_lgamp": {"keep_frozen": "device"},
            "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True},
        },
        "zero_quantized_nontrainable_weights is true, but ds_lgamp.keep_frozen says that frozen weights do not travel",
    ),
    "bits of gradients that travel as they are": (
        {"ds_lgamp": {"quantised_gradient_bits": 4}, "zero_optimization": {"stage": 2}},
        "ds_lgamp.quantised_gradient_bits is 4, but zero_optimization.zero_quantized_gradients is not true; set it",
    ),
    "tensor parallelism by DeepSpeed": ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size is 2"),
    "compiled communication": ({"compile": {"deepcompile": True}}, "compile.deepcompile is True"),
    "another engine": ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled is True"),
    "an optimizer of whole tensors": (
        {"optimizer": {"type": "MuAdam"}},
        "optimizer.type is 'muadam', which scales by the shapes of whole tensors; shards take one of",
    ),
    "an option that LAMB lacks": (
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.1, "eps_inside_sqrt": True}}},
        "optimizer.params is {'lr': 0.1, 'eps_inside_sqrt': True}, but lamb refuses it (TypeError: ",
    ),
    "an option that Muon lacks": (
        {"optimizer": {"type": "Muon", "params": {"lr": 0.1, "amsgrad": True}}},
        "optimizer.params.amsgrad is no option of Muon; remove it",
    ),
    "a value that Muon lacks": (
        {"optimizer": {"type": "Muon", "params": {"ns_method": "svd"}}},
        "but muon refuses it (ValueError: ns_method is 'svd'; use one of standard, gram)",
    ),
    "an unknown optimizer": ({"optimizer": {"type": "Adma"}}, "optimizer.type is 'Adma'"),
}


def merged(changes):
    """Returns the base configuration with changes."""
    config = {key: value for key, value in {**BASE, "ds_lgamp": {}, **changes}.items() if value is not None}
    return {key: None if value is NULL else value for key, value in config.items()}
