"""Hypothesis strategies for models and for configurations that train them."""

from dataclasses import replace

from hypothesis import strategies as st

from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.model import Model


@st.composite
def models(draw) -> Model:
    """Draws a transformer of 8 to 17 layers with a feed-forward part of usual width, or with experts behind one to
    three layers that have none."""
    hidden = draw(st.sampled_from([128, 1024, 4096]))
    model = Model.gpt("drawn", draw(st.integers(8, 17)), hidden, 8, 1024, draw(st.sampled_from([1000, 50304])))
    if draw(st.booleans()):
        return model
    rotary = {"gated": True, "biases": False, "position_embeddings": 0, "feed_forward_size": 8 * hidden // 3}
    model = replace(model, **rotary, key_value_heads=2, tied_embeddings=draw(st.booleans()))
    if draw(st.booleans()):
        return model
    sizes = {"dense_layers": draw(st.integers(1, 3)), "dense_size": hidden, "shared_size": hidden // 2}
    return replace(model, experts=draw(st.sampled_from([2, 16])), experts_per_token=2, **sizes)


@st.composite
def configurations(draw, in_parts: bool = False) -> Configuration:
    """Draws a configuration of at most 8 chunks; with ``in_parts`` also a vee, and backwards in two parts."""
    ranks = draw(st.integers(1, 5))
    schedule = draw(st.sampled_from(["layered", "layered", "interleaved_1f1b", "1f1b", "gpipe"] + ["zbv"] * in_parts))
    if schedule == "zbv":
        ranks = min(ranks, 4)
    micro_batches, group = draw(st.integers(1, 12)), None
    if schedule == "layered":
        group = draw(st.sampled_from([None, None, 1, 2, 4]))
    elif schedule == "interleaved_1f1b":
        micro_batches = ranks * draw(st.integers(1, 3))
    zero_stage, tensor_ranks = draw(st.integers(0, 3)), draw(st.sampled_from([1, 1, 2]))
    states = ["fp32", "fp32", *["bf16"] * (zero_stage > 0), *["8bit"] * (tensor_ranks == 1)]
    chunks = {"1f1b": 1, "gpipe": 1, "zbv": 2}.get(schedule)
    return Configuration(
        draw(st.sampled_from([1, 2, 8])),
        ranks,
        tensor_ranks,
        draw(st.sampled_from([1, 4])),
        micro_batches,
        zero_stage=zero_stage,
        schedule=schedule,
        chunks_per_rank=chunks or draw(st.integers(1, 8 // ranks)),
        resident_chunks=draw(st.integers(1, 5)),
        recompute=draw(st.sampled_from(["full", "none"])),
        micro_batch_group=group,
        weight_bits=draw(st.sampled_from([None, 8])) if zero_stage == 3 else None,
        gradient_bits=draw(st.sampled_from([None, None, 8, 4])) if zero_stage > 0 else None,
        activation_dtype=draw(st.sampled_from([None, "fp8"])) if ranks > 1 else None,
        state=draw(st.sampled_from(states)),
        split_backward=draw(st.integers(0, ranks)) if in_parts and ranks > 1 and tensor_ranks == 1 else 0,
    )
