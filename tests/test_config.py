import pytest

from ds_lgamp.config import ConfigError, read_block


@pytest.mark.parametrize("config", [{}, {"ds_lgamp": {"enabled": False}}, {"ds_lgamp": None}])
def test_no_block_or_a_disabled_one_is_none(config):
    assert read_block(config) is None


@pytest.mark.parametrize(("keys", "steps"), [({}, (10, 12)), ({"trace_steps": "3:3"}, (3, 3))])
def test_a_trace_has_its_first_and_its_last_step(keys, steps):
    assert read_block({"ds_lgamp": {"trace": "runs/trace", **keys}}).traced_steps == steps


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([], "ds_lgamp is []; it must be an object"),
        ({"shedule": "layered"}, "ds_lgamp.shedule is no known key; did you mean schedule?"),
        ({"schedule": "layerd"}, "ds_lgamp.schedule is 'layerd': input should be 'layered'"),
        ({"placement": "random"}, "ds_lgamp.placement is 'random'"),
        ({"resident_chunks": "2"}, "ds_lgamp.resident_chunks is '2': input should be a valid integer"),
        ({"resident_chunks": 0}, "ds_lgamp.resident_chunks is 0: input should be greater than 0"),
        ({"layers_per_chunk": 0}, "ds_lgamp.layers_per_chunk is 0: input should be greater than 0"),
        ({"micro_batch_group": "some"}, "ds_lgamp.micro_batch_group is 'some'"),
        ({"recompute": "half"}, "ds_lgamp.recompute is 'half'"),
        (
            {"recompute": "auto", "recompute_memory": "60 Gigs"},
            "ds_lgamp.recompute_memory is '60 Gigs': write a number and a unit of bytes, such as B, kB, MB, GB",
        ),
        ({"recompute": "auto", "recompute_memory": "0 GB"}, "ds_lgamp.recompute_memory is '0 GB': it must be finite"),
        ({"recompute_memory": "60 GB"}, "recompute_memory is '60 GB', but recompute is 'full'; use 'auto'"),
        ({"trace": "x", "trace_steps": "3:1"}, "ds_lgamp.trace_steps is '3:1': give the first and the last step, from"),
        ({"trace": "x", "trace_steps": "0:1"}, "ds_lgamp.trace_steps is '0:1': give the first and the last step, from"),
        ({"trace_steps": "1:2"}, "trace_steps is '1:2', but there is no trace; set trace to a folder"),
        ({"chunks_per_rank": 2, "layers_per_chunk": 2}, "keep one of them"),
        ({"schedule": "1f1b", "chunks_per_rank": 2}, "chunks_per_rank is 2, but schedule '1f1b' has one chunk"),
        ({"schedule": "gpipe", "layers_per_chunk": 2}, "layers_per_chunk is 2, but schedule 'gpipe' has one chunk"),
        ({"schedule": "gpipe", "micro_batch_group": 2}, "groups belong to schedule 'layered'"),
        ({"schedule": "interleaved_1f1b", "placement": "contiguous"}, "needs 'modular'"),
        ({"schedule": "zbv", "chunks_per_rank": 3}, "chunks_per_rank is 3, but schedule 'zbv' has two chunks per pipe"),
        ({"schedule": "zbv", "layers_per_chunk": 2}, "layers_per_chunk is 2, but schedule 'zbv' has two chunks per pi"),
        (
            {"schedule": "zbv", "placement": "contiguous"},
            "placement is 'contiguous', but schedule 'zbv' has two chunks",
        ),
        (
            {"schedule": "zbv", "micro_batch_group": 2},
            "micro_batch_group is 2, but groups belong to schedule 'layered'",
        ),
        ({"placement": "vee"}, "placement is 'vee', which belongs to schedule 'zbv'; use that, or remove placement"),
        ({"compile": "yes"}, "ds_lgamp.compile is 'yes': input should be a valid "),
        ({"compile": {"moed": "default"}}, "moed is no option of torch.compile; use backend, mode, dynamic"),
        ({"compile": {"dynamic": "no"}}, "its dynamic must be a bool"),
        ({"compile": {"mode": "default", "options": {}}}, "torch.compile takes a mode or options; keep one of them"),
        ({"compile": {"mode": "reduce-overhead"}}, "use mode 'max-autotune-no-cudagraphs'"),
        ({"compile": {"options": {"triton.cudagraphs": True}}}, "its CUDA graphs would keep the addresses of weights"),
        ({"compile": {"backend": "cudagraphs"}}, "its CUDA graphs would keep the addresses of weights"),
        (
            {"compile": True, "recompute": "auto", "recompute_memory": "1 GB"},
            "compile is True, but recompute is 'auto', which cannot measure compiled code; set recompute to 'full'",
        ),
        (
            {"overlap_exchanges": True, "reproducible": True},
            "overlap_exchanges is True, but reproducible is True, which seeds generators before each layer",
        ),
        ({"overlap_exchanges": True, "compile": True}, "compile is True, which compiles in one thread; remove one"),
        ({"overlap_exchanges": True, "split_backward": 2}, "split_backward is 2, which keeps parts of backwards apart"),
        (
            {"overlap_exchanges": True, "offload_activations": "cpu"},
            "offload_activations is 'cpu', which brings inputs back one by one; remove one of them",
        ),
        ({"compile": True, "reproducible": True}, "compile is True, whose code for the first shapes rounds otherwise"),
        ({"live_checkpoint": ""}, "ds_lgamp.live_checkpoint is ''"),
        ({"live_checkpoint": "live", "nonfinite": "abort"}, "nonfinite is 'abort', which finds a bad step when its"),
    ],
)
def test_bad_blocks_are_refused_in_a_sentence(block, message):
    with pytest.raises(ConfigError) as refused:
        read_block({"ds_lgamp": block})
    assert message in str(refused.value) and "\n" not in str(refused.value)
    # The caller puts the name of the program first.
    assert not str(refused.value).startswith("ds_lgamp:")
