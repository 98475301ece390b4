"""Megatron-LM's flags and the configuration file: what the block adds to the flags, and what is refused in one
sentence."""

import json
from argparse import Namespace

import pytest
from megatron.core import num_microbatches_calculator

from ds_lgamp.config import ConfigError, LgampConfig, read_block
from ds_lgamp.integrations.megatron.loop.arguments import check_file, validate_with_block
from ds_lgamp.integrations.megatron.loop.run_script import split_option
from ds_lgamp.integrations.megatron.loop.several_chunks import (
    Chunks,
    chunks_provider,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from testing.forks import run_module


def flags(**given):
    """Returns the flags that matter here, with Megatron-LM's defaults."""
    return Namespace(
        **{
            "num_layers": 8,
            "pipeline_model_parallel_size": 2,
            "data_parallel_size": 2,
            "micro_batch_size": 2,
            "global_batch_size": 32,
            "rampup_batch_size": None,
            "clip_grad": 1.0,
            "bf16": False,
            "fp16": False,
            "use_distributed_optimizer": False,
            "num_layers_per_virtual_pipeline_stage": None,
            "num_virtual_stages_per_pipeline_rank": None,
            "pipeline_model_parallel_layout": None,
            "decoder_first_pipeline_num_layers": None,
            "decoder_last_pipeline_num_layers": None,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "mtp_num_layers": None,
            "virtual_pipeline_model_parallel_size": None,
            "overlap_p2p_comm": True,
            "align_param_gather": True,
            "recompute_granularity": None,
            "recompute_method": None,
            "recompute_num_layers": None,
            "recompute_activations": False,
            "ddp_bucket_size": None,
            "ddp_num_buckets": None,
        }
        | given
    )


def validated(args, config):
    """Validates ``args`` as Megatron-LM does, as far as it matters here. Returns them and the keys that nobody
    reads."""

    def validate():
        layout = args.pipeline_model_parallel_layout
        chunks = layout.count("|") + 1 if layout else args.pipeline_model_parallel_size
        virtual = chunks // args.pipeline_model_parallel_size
        assert virtual == 1 or args.pipeline_model_parallel_size > 1
        args.virtual_pipeline_model_parallel_size = virtual if virtual > 1 else None
        if virtual == 1:
            args.overlap_p2p_comm = args.align_param_gather = False

    unread = validate_with_block(args, check_file(config, read_block(config)), validate)
    return args, unread


VIRTUAL, EACH = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def test_chunks_are_gathered_and_reduced_whole_unless_the_user_says_otherwise():
    assert validated(flags(), {"ds_lgamp": {}})[0].ddp_bucket_size > 10**15
    assert validated(flags(ddp_bucket_size=10), {"ds_lgamp": {}})[0].ddp_bucket_size == 10
    assert validated(flags(ddp_num_buckets=2), {"ds_lgamp": {}})[0].ddp_bucket_size is None
    assert validated(flags(), {"ds_lgamp": {"chunks_per_rank": 1}})[0].ddp_bucket_size is None


@pytest.mark.parametrize(
    ("recompute", "given", "expected"),
    [
        (None, {"recompute_granularity": "selective"}, ("selective", None, None)),
        ("full", {}, ("full", "uniform", 1)),
        ("selective", {}, ("selective", None, None)),
        ("selective", {"recompute_activations": True}, ("selective", None, None)),
        ("none", {}, (None, None, None)),
        ("auto", {}, ("full", "uniform", 1)),
        (
            "auto",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            ("full", "uniform", 2),
        ),
        (
            "full",
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
            ("full", "block", 2),
        ),
    ],
)
def test_recomputation_is_asked_of_megatron(recompute, given, expected):
    block = {} if recompute is None else {"recompute": recompute}
    args, _ = validated(flags(**given), {"ds_lgamp": block})
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == expected


def test_keys_that_nobody_reads_are_named():
    config = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": False, "immediate_grad_update": True},
        "optimizer": {},
        "zero_optimization": {"stage": 0, "overlap_comm": True},
        "ds_lgamp": {"resident_chunks": 2, "defer_gathers": False, "keep_last": 1},
    }
    assert validated(flags(), config)[1] == [
        "optimizer",
        "zero_optimization.overlap_comm",
        "bf16.immediate_grad_update",
        "ds_lgamp.resident_chunks",
        "ds_lgamp.defer_gathers",
        "ds_lgamp.keep_last",
    ]


OF_FILES = [
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; set 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": 1}}, "stage is 1, but --use-distributed-optimizer is not given"),
    ({"train_batch_size": 64}, "train_batch_size is 64, but --global-batch-size is 32"),
    ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu is 1, but --micro-batch-size is 2"),
    ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4, but .* makes 8 micro-batches"),
    ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, but --clip-grad is 1.0"),
    ({"bf16": {"enabled": True}}, "bf16.enabled is True, but --bf16 is False"),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
        "zero_hpz_partition_size is 8, but in Megatron-LM's training loop all data-parallel ranks share a chunk's",
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        "offload_optimizer.device is 'cpu', but in Megatron-LM's training loop everything stays",
    ),
]
OF_BLOCKS = [
    ({"reproducible": True}, "reproducible is True, .*--deterministic-mode"),
    ({"overlap_update": True}, "overlap_update is True, but Megatron-LM's own optimizer"),
    ({"nonfinite": "skip"}, "nonfinite is 'skip', but Megatron-LM has a check of its own, unless --no-check-for-nan"),
    ({"live_checkpoint": "live"}, "live_checkpoint is 'live', but Megatron-LM has .*set --save and --save-interval"),
    (
        {"activation_dtype": "fp8"},
        "activation_dtype is 'fp8', but in Megatron-LM's training loop hidden states",
    ),
    ({"offload_activations": "cpu"}, "offload_activations is 'cpu', but in Megatron-LM's training loop"),
    ({"schedule": "zbv"}, "schedule is 'zbv', but Megatron-core's chunks are modular; use 'layered'"),
    ({"placement": "contiguous"}, "placement is 'contiguous', but Megatron-core's chunks are modular"),
    ({"chunks_per_rank": 5}, "chunks_per_rank is 5: 2 pipeline ranks would need 10 layers, the model has 8"),
    ({"layers_per_chunk": 3}, "is 3: 8 layers make 3 chunks, but .* 2 .*-parallel-layout"),
    ({"pipeline_rank_speeds": [2]}, "1 speeds for 2 pipeline ranks"),
    ({"data_rank_speeds": [2, 1]}, "data_rank_speeds is .*, but Megatron-LM's training loop"),
    ({"blocks": "layers"}, "ds_lgamp.blocks is set, but Megatron-core says what its layers are; remove it"),
]
OF_FLAGS = [
    ({"use_distributed_optimizer": True}, "stage is 0, but --use-distributed-optimizer is given"),
    ({"num_layers": 1}, "--pipeline-model-parallel-size is 2, but the model has 1 layers; use at most 1"),
    ({VIRTUAL: 3}, r"ranks have \[4, 4\] layers, which 3 chunks .* a divisor"),
    ({VIRTUAL: 0}, "which 0 chunks on each cannot share equally"),
    ({EACH: 3}, r"is 3, but .* \[4, 4\] layers; use a divisor"),
    ({EACH: 1, FIRST: 2}, r"is 1, but .* \[2, 6\] layers; .* or --num-virtual-stages-per-pipeline-rank"),
    ({VIRTUAL: 2, "num_layers": 7}, "--num-layers is 7, which leaves 7 layers"),
    ({FIRST: 3, LAST: 3}, "and --decoder-last-pipeline-num-layers is 3, which leaves 2 layers to 0 pipeline ranks"),
    ({FIRST: 0}, "first-pipeline-num-layers is 0, which leaves 8 layers to 1"),
    ({FIRST: 9}, "which leaves -1 layers to 1 pipeline ranks"),
    ({LOSS: True}, "pipeline-split is True, which leaves 9 layers to 2"),
    ({LOSS: True, FIRST: 3}, "--decoder-first-.* and --account-for-loss-.* are given, .* remove one of them"),
    ({VIRTUAL: 2, EACH: 2}, "per-pipeline-rank and --num-layers-per-virtual-pipeline-stage both cut"),
    (
        {FIRST: 2, "pipeline_model_parallel_layout": "Ett|tt|tt|ttL"},
        "--pipeline-model-parallel-layout and --decoder-first-pipeline-num-layers both cut",
    ),
    ({"use_megatron_fsdp": True}, "--use-megatron-fsdp is True: .* set zero_optimization.stage 3"),
    ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 is True: "),
    ({"microbatch_group_size_per_vp_stage": 2}, "--microbatch-group-size-.* 2: .* set ds_lgamp.micro_batch_group"),
    ({"multiple_validation_sets": True}, "--multiple-validation-sets is True: every chunk"),
    ({"reset_attention_mask": True}, "--reset-attention-mask is given, but Megatron-LM gives the masks to the"),
    ({"sft": True}, "--sft is given, but Megatron-LM gives the boundaries of its documents to"),
    ({"full_validation": True}, "--full-validation is given, but Megatron-LM gives the length of its data to"),
    ({"inprocess_restart": True}, "--inprocess-restart is True: a rank that dies ends the others"),
    ({"mtp_num_layers": 1}, "--mtp-num-layers is given; place these layers with --pipeline-model"),
]
OF_SEVERAL = [
    (
        {"zero_optimization": {"stage": 3}},
        {},
        {"async_save": True},
        "--async-save is True beside zero_optimization.stage 2",
    ),
    ({}, {"recompute": "none"}, {"recompute_activations": True}, "recompute is 'none', but the flags say selective"),
    ({}, {"recompute": "auto"}, {"recompute_activations": True}, "recompute is 'auto', but the flags say selective"),
    (
        {},
        {"recompute": "auto"},
        {"expert_model_parallel_size": 2},
        "recompute is 'auto', but expert_model_parallel_size is 2: ranks with other tokens",
    ),
    (
        {},
        {"chunks_per_rank": 2},
        {VIRTUAL: 2},
        "--num-virtual-stages-per-pipeline-rank and ds_lgamp.chunks_per_rank both cut the layers; keep one",
    ),
    (
        {},
        {"layers_per_chunk": 2},
        {FIRST: 2},
        "--decoder-first-pipeline-num-layers and ds_lgamp.layers_per_chunk both cut",
    ),
    ({}, {"schedule": "1f1b"}, {VIRTUAL: 2}, "takes one chunk per rank"),
    ({}, {"chunks_per_rank": 2}, {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"}, "chunks_per_rank both cut"),
    ({}, {"pipeline_rank_speeds": [2, 1]}, {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"}, "speeds both cut"),
    (
        {},
        {"schedule": "interleaved_1f1b"},
        {"global_batch_size": 12},
        "but a batch has 3 .gradient_accumulation_steps, or Megatron-LM's --global-batch-size.; change that, or use",
    ),
    (
        {},
        {"schedule": "interleaved_1f1b"},
        {"rampup_batch_size": ["8", "4", "100"]},
        "but a batch has 3 .gradient_accumulation_steps, or Megatron-LM's --global-batch-size.; change that, or use",
    ),
    ({}, {"schedule": "1f1b"}, {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"}, "takes one chunk per rank"),
]
REFUSED = [
    *((config, {}, {}, words) for config, words in OF_FILES),
    *(({}, block, {}, words) for block, words in OF_BLOCKS),
    *(({}, {}, given, words) for given, words in OF_FLAGS),
    *OF_SEVERAL,
]


@pytest.mark.parametrize(("config", "block", "given", "words"), REFUSED)
def test_what_cannot_work_is_refused(config, block, given, words):
    with pytest.raises(ConfigError, match=words):
        validated(flags(**given), {**config, "ds_lgamp": block})


needs_steps = pytest.mark.skipif(
    not hasattr(num_microbatches_calculator, "StepBatchsizeNumMicroBatchesCalculator"),
    reason="Megatron-core has --step-batch-size-schedule from 0.18 on",
)
STEPS = {"step_batch_size_schedule": "0:16,1K:32", "global_batch_size": 4, "seq_length": 32}
"""Megatron-LM sets the size of a batch to that of a micro-batch on every rank if there is a schedule of sizes."""


@needs_steps
def test_batches_that_grow_by_steps_are_those_that_count():
    validated(flags(**STEPS), {"ds_lgamp": {"schedule": "interleaved_1f1b"}, "train_batch_size": "auto"})
    ignored = {"step_batch_size_schedule": None, "rampup_batch_size": ["8", "4", "100"]}
    validated(flags(**ignored), {"ds_lgamp": {"schedule": "interleaved_1f1b"}})
    odd = {**STEPS, "step_batch_size_schedule": "0:16,1K:20"}
    with pytest.raises(ConfigError, match="but a batch has 5 .gradient_accumulation_steps, or Megatron-LM's"):
        validated(flags(**odd), {"ds_lgamp": {"schedule": "interleaved_1f1b"}})


@needs_steps
@pytest.mark.parametrize("key", ["train_batch_size", "gradient_accumulation_steps"])
def test_batches_that_grow_have_no_size_in_the_file(key):
    with pytest.raises(ConfigError, match=f"{key} is 4, but --step-batch-size-schedule has several sizes; remove"):
        validated(flags(**STEPS), {"ds_lgamp": {}, key: 4})


@pytest.mark.parametrize(
    "section",
    [
        {"stage": None},
        {"zero_hpz_partition_size": 0},
        {"zero_hpz_partition_size": None, "mics_shard_size": None},
        {"offload_optimizer": {"device": None}, "offload_param": None},
    ],
)
def test_what_is_switched_off_is_not_refused(section):
    assert check_file({"zero_optimization": section}, LgampConfig()).zero_stage == 0


def test_the_option_is_taken_from_the_command_line_or_the_environment(monkeypatch):
    assert split_option(["--lr", "1", "--ds-lgamp-config", "a.json", "-x"]) == ("a.json", ["--lr", "1", "-x"])
    assert split_option(["--ds-lgamp-config=a.json"]) == ("a.json", [])
    assert split_option(["--lr", "1"]) == (None, ["--lr", "1"])
    monkeypatch.setenv("DS_LGAMP_CONFIG", "b.json")
    assert split_option([]) == ("b.json", [])
    assert split_option(["--ds-lgamp-config", "a.json"]) == ("a.json", [])
    with pytest.raises(ConfigError, match="--ds-lgamp-config has no value"):
        split_option(["--ds-lgamp-config"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "holds list; it must hold an object"),
        ("{}", "has no ds_lgamp block; add one"),
        (
            '{"ds_lgamp": {"chunk_per_rank": 1}}',
            "ds_lgamp.chunk_per_rank is no known key; did you mean chunks_per_rank",
        ),
        ('{"ds_lgamp": {}}', "megatron.training cannot be imported"),
        ('{"ds_lgamp": {"schedule": "gpipe", "layers_per_chunk": 2}}', "layers_per_chunk is 2, but schedule 'gpipe'"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_run_with_a_sentence(tmp_path, content, words):
    (tmp_path / "script.py").write_text("print('started')")
    # Releases of Megatron-core from 0.17 on have megatron.training.
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").write_text("raise ImportError('it is not there')")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    done = run(tmp_path)
    assert done.status == 2 and done.output == ""
    (line,) = [line for line in done.complaints.splitlines() if line.startswith("ds_lgamp:")]
    assert words in line and "Traceback" not in done.complaints
    assert line.count("ds_lgamp:") == 1


def test_a_block_that_is_not_enabled_leaves_the_script_alone_but_for_the_words_of_deepspeeds_launcher(tmp_path):
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:], 'megatron.core' in sys.modules)")
    (tmp_path / "config.json").write_text(json.dumps({"ds_lgamp": {"enabled": False}}))
    assert run(tmp_path).output == run(tmp_path, "--local_rank=0").output == "['--lr', '1'] False\n"


def run(folder, *launcher_words):
    words = ["ds_lgamp", *launcher_words, "run", str(folder / "script.py"), "--lr", "1"]
    return run_module([*words, "--ds-lgamp-config", str(folder / "config.json")])


def provider(pre_process, post_process, vp_stage, config, block="decoder"):
    model = Namespace(ends=(pre_process, post_process), stage=vp_stage, output_layer=None)
    model.config = config
    setattr(model, block, Namespace(layers=[vp_stage]))
    model.share_embeddings_and_output_weights = False
    return model


@pytest.mark.parametrize("block", ["decoder", "encoder"])
def test_one_pipeline_ranks_chunks_stand_where_megatron_lm_builds_one_model(block):
    build = chunks_provider(provider, 3)
    chunks = build(pre_process=True, post_process=True, config=Namespace(num_layers=3), block=block)
    chunks.model_type = "type"
    assert isinstance(chunks, Chunks) and isinstance(chunks, list)
    assert [chunk.ends for chunk in chunks] == [(True, False), (False, False), (False, True)]
    assert [(chunk.vp_stage, chunk.stage, chunk.model_type) for chunk in chunks] == [(n, n, "type") for n in range(3)]


def test_models_that_have_no_chunks_are_refused_on_one_rank():
    with pytest.raises(ConfigError, match="have 3 layers, but num_layers is 1: Namespace ignores vp_stage"):
        chunks_provider(provider, 3)(config=Namespace(num_layers=1))
    with pytest.raises(ConfigError, match="model_provider takes no vp_stage, .*; set ds_lgamp.chunks_per_rank to 1"):
        chunks_provider(lambda pre_process, post_process: None, 3)


def test_a_layer_count_asked_for_without_a_chunk_is_refused_on_one_rank():
    config = Namespace(pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=2)
    for function in (get_num_layers_to_build, get_transformer_layer_offset):
        with pytest.raises(ConfigError, match="which of a rank's chunks it builds; pass it vp_stage"):
            function(config)
