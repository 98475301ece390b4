"""Megatron-core layers on tensor-parallel ranks, with a pipeline and data parallelism, train like one process."""

import re
from pathlib import Path
from typing import NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import ds_lgamp
from ds_lgamp.checkpoint.whole import SINGLE, read_safetensors, read_whole, write_safetensors
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.shared_tensors import Sharing, sharing_of
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import Muon
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import seed
from tests.slow import chosen, slow_except

VOCABULARY, SEQUENCE, MICRO_BATCHES, END = 64, 16, 4, 0
"""The micro-batches are those of all data-parallel ranks."""
SAVED, RESUMED = 2, 2


class Place(NamedTuple):
    tensor_ranks: int
    pipeline_ranks: int
    data_ranks: int
    stage: int
    sequence_parallel: bool = False
    positions: str = "learned_absolute"
    tied: bool = True
    documents: bool = False
    """Whether samples hold several documents, which do not see each other."""
    dropout: float = 0.0
    recompute: str = "full"
    nodes: str = ""
    """The key that forms groups of two data-parallel ranks."""
    optimizer: str = "AdamW"
    """A key of :data:`OPTIMIZERS`."""

    @property
    def ranks(self) -> int:
        return self.tensor_ranks * self.pipeline_ranks * self.data_ranks


PLACES = [
    Place(2, 1, 1, 0),
    Place(2, 1, 1, 3, sequence_parallel=True, positions="rope", tied=False),
    Place(4, 1, 1, 2, sequence_parallel=True),
    Place(2, 2, 2, 3, sequence_parallel=True, documents=True),
    Place(2, 2, 2, 3, positions="rope", tied=False),
    Place(2, 2, 2, 1, sequence_parallel=True, positions="rope", tied=False),
    Place(2, 1, 4, 3, sequence_parallel=True, nodes="zero_hpz_partition_size"),
    Place(2, 1, 4, 3, nodes="mics_shard_size"),
    Place(2, 1, 1, 0, sequence_parallel=True, optimizer="Lamb"),
    Place(2, 1, 1, 1, positions="rope", tied=False, optimizer="Muon"),
    Place(2, 2, 2, 3, sequence_parallel=True, optimizer="Lamb"),
    Place(2, 2, 2, 2, positions="rope", tied=False, optimizer="Muon"),
]
DEFAULT = [place for place in PLACES if place.ranks == 2]
"""Places that are not slow."""


def by_shape(module, decays=(0.0, 0.0)):
    """Returns groups of matrices and of vectors."""
    return [
        {"params": [each for each in module.parameters() if (each.dim() > 1) == matrices], "weight_decay": decay}
        for matrices, decay in zip((True, False), decays)
    ]


def for_muon(module):
    """Returns groups of hidden matrices and of all other parameters. The gram method computes in fp32 on a CPU; the
    standard one rounds to bf16, so that other orders of summation show."""
    groups = [{"params": [], "use_muon": uses_muon, "ns_method": "gram"} for uses_muon in (True, False)]
    for name, parameter in module.named_parameters():
        hidden = parameter.dim() == 2 and not any(word in name for word in ("embed", "output_layer"))
        groups[not hidden]["params"].append(parameter)
    return groups


OPTIMIZERS = {
    "AdamW": lambda module: torch.optim.AdamW(by_shape(module, (0.01, 0.01)), lr=0.01, eps=1e-4),
    "Lamb": lambda module: Lamb(by_shape(module, (0.1, 0.0)), lr=0.01, eps=1e-4),
    "Muon": lambda module: Muon(for_muon(module), {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "eps": 1e-4}),
}


def engine_of(place: Place, live: Path | None = None):
    """Returns the engine of a run, with live states in the folder ``live`` if it is given."""
    from megatron.core.transformer import TransformerConfig

    from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs, language_model_loss
    from tests.integrations.megatron.on_cpu import start_megatron

    start_megatron(place.tensor_ranks)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        qk_layernorm=True,
        init_method_std=0.1,  # makes their gradients large enough to matter
        hidden_dropout=place.dropout,
        attention_dropout=place.dropout,
        use_cpu_initialization=True,
        tensor_model_parallel_size=place.tensor_ranks,
        sequence_parallel=place.sequence_parallel,
    )
    ds_lgamp.install()
    with quiet():
        module = PipelineModule(
            gpt_layer_specs(
                config,
                VOCABULARY,
                SEQUENCE,
                place.positions,
                place.tied,
                end_of_document=END,
                reset_attention_mask=place.documents,
                reset_position_ids=place.documents,
            ),
            topology=PipeModelDataParallelTopology(place.pipeline_ranks, place.tensor_ranks, place.data_ranks),
            loss_fn=language_model_loss,
            seed_layers=True,
            seed_fn=seed,
        )
        return deepspeed.initialize(
            model=module,
            optimizer=OPTIMIZERS[place.optimizer](module),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICRO_BATCHES // place.data_ranks,
                # Smaller than every norm, so all steps are clipped.
                "gradient_clipping": 0.3,
                "zero_optimization": {"stage": place.stage, **({place.nodes: 2} if place.nodes else {})},
                "ds_lgamp": {"recompute": place.recompute} | ({} if live is None else {"live_checkpoint": str(live)}),
            },
        )[0]


def batches(engine, step):
    count = engine.micro_batches
    for index in range(count):
        number = MICRO_BATCHES * step + count * engine.grid.data_parallel_id + index
        tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(number))
        tokens[tokens < 8] = END
        yield tokens[:, :-1].contiguous(), (tokens[:, 1:].contiguous(), torch.ones(2, SEQUENCE))


def steps(engine, count):
    """Runs steps. Returns loss and norm of each."""
    results = []
    for _ in range(count):
        loss = engine.train_batch(batches(engine, engine.global_steps)).item()
        results.append((loss, float(engine.get_global_grad_norm())))
    return results


def train(folder, places):
    """Trains at every place and writes a checkpoint on the way. Returns the steps of each."""
    prepare_rank()
    results = {}
    for place in places:
        engine = engine_of(place)
        before = steps(engine, SAVED)
        engine.save_checkpoint(folder, tag=tag_of(place))
        results[place] = before + steps(engine, RESUMED)
        engine.wait_for_checkpoint()
    return results


def resume(folder, pairs):
    """Loads the checkpoint of one place at another and writes it again. Returns the steps after it."""
    prepare_rank()
    results = {}
    for source, target in pairs:
        engine = engine_of(target)
        engine.load_checkpoint(folder, tag=tag_of(source))
        engine.save_checkpoint(folder, tag=f"{tag_of(source)} at {tag_of(target)}")
        results[source, target] = steps(engine, RESUMED)
        engine.wait_for_checkpoint()
    return results


def tag_of(place: Place) -> str:
    return "-".join(map(str, place))


def alone_like(place: Place) -> Place:
    """Returns the place of one process with the same model."""
    return place._replace(tensor_ranks=1, pipeline_ranks=1, data_ranks=1, stage=0, sequence_parallel=False, nodes="")


ALONE = sorted({alone_like(place) for place in PLACES})
PAIRS = [(place, alone_like(place)) for place in PLACES] + [(alone_like(place), place) for place in PLACES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(folder, request):
    results = {}
    # Pairs are of all places.
    wanted = PLACES if chosen(request, "source") else sorted(chosen(request, "place") & {*PLACES})
    alone = sorted({alone_like(place) for place in wanted})
    for ranks in sorted({place.ranks for place in [*alone, *wanted]}):
        places = [place for place in [*alone, *wanted] if place.ranks == ranks]
        results |= run_on_ranks(ranks, train, str(folder), places)[0]
    return results


@pytest.fixture(scope="module")
def resumed(folder, trained):
    results = {}
    for ranks in (1, 2, 4, 8):
        pairs = [pair for pair in PAIRS if pair[1].ranks == ranks]
        results |= run_on_ranks(ranks, resume, str(folder), pairs)[0]
    return results


@pytest.mark.parametrize("place", slow_except(DEFAULT, PLACES), ids=tag_of)
def test_losses_and_norms_are_those_of_one_process(trained, place):
    for here, alone in zip(trained[place], trained[alone_like(place)]):
        assert here == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_checkpoint_loads_on_other_tensor_parallel_ranks(folder, trained, resumed, source, target):
    for goes_on, went_on in zip(resumed[source, target], trained[source][SAVED:]):
        assert goes_on == pytest.approx(went_on, rel=1e-5)
    written = read_whole(Path(folder) / tag_of(source))
    loaded = read_whole(Path(folder) / f"{tag_of(source)} at {tag_of(target)}")
    assert written.parameters.keys() == loaded.parameters.keys()
    for name, values in written.parameters.items():
        assert torch.equal(values, loaded.parameters[name]), name
    # Muon has other moments for its matrices than for the rest.
    for key, moments in written.moments.items():
        assert moments.keys() == loaded.moments[key].keys(), key
        for name, values in moments.items():
            assert torch.equal(values, loaded.moments[key][name]), (key, name)


DROPPING = [
    Place(2, 1, 1, 3, sequence_parallel, dropout=0.3, recompute=recompute)
    for sequence_parallel in (False, True)
    for recompute in ("none", "full")
]


def drop(places):
    """Returns by place the steps, and the random states from which attention and hidden states drew their dropout."""
    prepare_rank()
    functional, drawn = torch.nn.functional, {}

    def recorded(name):
        function = getattr(functional, name)

        def recording(*given, **named):
            drawn.setdefault(name, []).append(torch.get_rng_state().numpy().tobytes())
            return function(*given, **named)

        setattr(functional, name, recording)

    for name in ("scaled_dot_product_attention", "dropout"):
        recorded(name)
    results = {}
    for place in places:
        drawn.clear()
        engine = engine_of(place)
        seed(11)
        results[place] = steps(engine, 2), dict(drawn)
    return results


@pytest.fixture(scope="module")
def dropped():
    return run_on_ranks(2, drop, DROPPING)


@pytest.mark.parametrize("place", DROPPING, ids=tag_of)
def test_tensor_parallel_ranks_drop_alike_where_they_compute_the_same_and_only_there(dropped, place):
    (_, first), (_, second) = (results[place] for results in dropped)
    assert first.keys() == second.keys() == {"scaled_dot_product_attention", "dropout"}
    for name, states in first.items():
        same = [one == other for one, other in zip(states, second[name], strict=True)]
        assert all(same) if name == "dropout" and not place.sequence_parallel else not any(same)
        # The last chunk, with one layer, is not recomputed.
        draws_of_a_layer = {"scaled_dot_product_attention": 1, "dropout": 2}[name] * 2 * MICRO_BATCHES
        again = len(set(states)) - draws_of_a_layer if place.recompute == "full" else 0
        assert len(states) == len(set(states)) + again, "each draws once, and again when recomputed"


@pytest.mark.parametrize("place", [place for place in DROPPING if place.recompute == "full"], ids=tag_of)
def test_recomputation_drops_what_the_forward_dropped(dropped, place):
    for results in dropped:
        kept, without = results[place._replace(recompute="none")][0], results[place][0]
        assert [step == pytest.approx(other, rel=1e-6) for step, other in zip(without, kept)] == [True, True]


def before_and_after_one_compiles():
    """Returns the steps of a training, and of the same one after the script of the second rank has compiled something.
    A layer ends with an exchange that a recomputation does without, unless torch may run other code the next time."""
    prepare_rank()
    expected = steps(engine_of(Place(2, 1, 1, 0)), 2)
    if dist.get_rank() == 1:
        torch.compile(lambda number: number + 1, backend="eager")(torch.ones(1))
    return expected, steps(engine_of(Place(2, 1, 1, 0)), 2)


def test_ranks_that_share_layers_recompute_alike_though_one_alone_has_compiled():
    for expected, found in run_on_ranks(2, before_and_after_one_compiles):
        assert found == expected


@pytest.mark.parametrize("place", slow_except(DEFAULT, PLACES), ids=tag_of)
def test_an_exported_checkpoint_goes_to_a_gpt_model_and_comes_back(folder, trained, place, tmp_path):
    from safetensors.torch import load_file, save_file

    from ds_lgamp.integrations.megatron.layers.gpt_weights import from_gpt_model, to_gpt_model

    source = Path(folder) / tag_of(place)
    write_safetensors(source, tmp_path / "exported", torch.float32, 2**30)
    model = to_gpt_model(load_file(tmp_path / "exported" / SINGLE))
    save_file(from_gpt_model(model), tmp_path / "imported.safetensors")
    weights, expected = read_safetensors(tmp_path / "imported.safetensors").parameters, read_whole(source).parameters
    assert torch.equal(model["decoder.layers.3.mlp.linear_fc1.weight"], expected["5.layer.mlp.linear_fc1.weight"])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def refusal(groups, told, axis):
    """Returns the sentence that refuses one model on two ranks, by its tensor-parallel size in the process groups, in
    the TransformerConfig and in the topology."""
    from megatron.core.transformer import TransformerConfig

    from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs, language_model_loss
    from tests.integrations.megatron.on_cpu import start_megatron

    prepare_rank()
    start_megatron(groups)
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "tensor_model_parallel_size": told}
    config = TransformerConfig(**sizes, use_cpu_initialization=True)
    ds_lgamp.install()
    with quiet(), pytest.raises(ConfigError) as refused:
        module = PipelineModule(
            gpt_layer_specs(config, VOCABULARY, SEQUENCE, "rope", True),
            topology=PipeModelDataParallelTopology(1, axis, 2 // axis),
            loss_fn=language_model_loss,
        )
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        deepspeed.initialize(
            model=module, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 2, "ds_lgamp": {}}
        )
    return str(refused.value)


@pytest.mark.parametrize(
    ("groups", "told", "axis", "words"),
    [
        (2, 1, 2, "tensor_model_parallel_size of the TransformerConfig is 1, but initialize_model_parallel made"),
        (2, 2, 1, r"slices layers over the ranks \[0, 1\], but the axis model of the topology has \[0\]; .* num_mp=2"),
        (1, 1, 2, r"slices layers over the ranks \[0\], but the axis model of the topology has \[0, 1\]"),
    ],
    ids=["other configuration", "no axis", "no groups"],
)
def test_another_tensor_parallel_size_is_refused(groups, told, axis, words):
    first, second = run_on_ranks(2, refusal, groups, told, axis)
    assert re.search(words, first)
    assert second == first


def test_a_parameter_says_how_it_is_shared():
    parameter = nn.Parameter(torch.zeros(2, 3))
    assert sharing_of("0.weight", parameter) == Sharing(None, False)
    parameter.sequence_parallel = True
    assert sharing_of("0.weight", parameter) == Sharing(None, True)
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 1, 1
    assert sharing_of("0.weight", parameter) == Sharing(1, False)
    for attribute, value in (("partition_stride", 2), ("partition_dim", -1)):
        setattr(parameter, attribute, value)
        with pytest.raises(ConfigError, match="parameter 0.weight is tensor-parallel with partition_dim"):
            sharing_of("0.weight", parameter)
