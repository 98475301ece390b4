"""One way to train a model on a cluster."""

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from ds_lgamp.cost.units import Travel
from ds_lgamp.fields import count
from ds_lgamp.planner.model import Model
from ds_lgamp.schedule.orders import default_placement
from ds_lgamp.schedule.placement import Placement, place_chunks, split_by_speed, split_evenly
from ds_lgamp.schedule.spec import ActivationType, Hierarchy, Offload, ProgramSpec

PLANNED = ("layered", "interleaved_1f1b", "1f1b", "gpipe", "zbv")
"""The schedules whose time and memory the planner predicts."""
RECOMPUTE = ("full", "none", "auto")
OFFLOAD = (None, "optimizer", "parameters")
KEEP_FROZEN = (None, "device", "host", "none")
STATES = {"fp32": "", "bf16": "state in bf16", "8bit": "moments in 8 bits"}
"""What the optimizer's state may be, with its words in the name of a method."""
_BITS = {"weight_bits": (None, 8), "gradient_bits": (None, 8, 4), "activation_dtype": (None, "fp8")}
ROUNDED = tuple(_BITS)
"""The fields that say what travels rounded."""


@dataclass(frozen=True)
class Configuration:
    """How the ranks divide the work. Raises ValueError if the numbers cannot be."""

    data_ranks: int
    pipeline_ranks: int
    tensor_ranks: int
    micro_batch: int
    """Sequences of one micro-batch."""
    micro_batches: int
    """Micro-batches per data-parallel rank and step."""
    zero_stage: int = 0
    schedule: str = "1f1b"
    chunks_per_rank: int = 1
    resident_chunks: int = 2
    recompute: str = "full"
    """full: chunks are recomputed in the backward pass; none: everything that autograd saves is kept; auto: it is kept
    of some pairs of chunk and micro-batch, as this project's engine alone does."""
    micro_batch_group: int | None = None
    """How many micro-batches pass through a chunk together (layered only); None: all."""
    micro_batch_outer: bool = False
    """Stock ZeRO-2 and ZeRO-3: every micro-batch reduces its gradients, and at stage 3 gathers every layer anew."""
    fused_attention: bool = True
    """Whether attention is one kernel, such as FlashAttention, that stores no scores."""
    overlaps: bool = True
    """Whether collectives over the data-parallel ranks run beside compute. The runs of published tables up to 2022 did
    without."""
    hierarchy: Hierarchy | None = None
    """How stage 3 spreads its shards over nodes, under the layered schedule; None if all data-parallel ranks are
    alike."""

    overlap_update: bool = False
    """Whether the optimizer updates each chunk by itself in the next step, as the key of the block does where gradients
    are clipped. Stock schedules do not."""
    offload: str | None = None
    """What the host holds, under the layered schedule: the optimizer's state and master weights, which it updates in
    the next step, or the parameters too (stage 3)."""
    on_disk: bool = False
    """Whether a disk of the host holds what is offloaded."""
    stores_inputs: bool = False
    """Whether the inputs of chunks wait on the host, under the layered schedule with recomputation."""
    stores_weights: bool = False
    """Whether gathered weights wait on the host for their next use in the step, under the layered schedule at stage 3.
    """
    split_backward: int = 0
    """How many backwards of a pipeline rank may wait for their second part; 0 if every backward is whole. This
    project's engine alone has two parts, under every schedule."""
    keep_frozen: Literal["device", "host", "none"] | None = None
    """Where frozen weights lie at stage 3, as the key of the block says; None without them, below stage 3, and in stock
    DeepSpeed, where ranks share them."""
    home_shared_by: int = 1
    """How many data-parallel ranks of a machine share the frozen weights on its host."""
    speeds: tuple[float, ...] = ()
    """The relative speed of each pipeline rank, by which they share layers; empty if all have equally many."""
    expert_ranks: int = 1
    """Data-parallel ranks that divide the experts of a layer; neighbours. 1: every rank has all of them."""
    weight_bits: int | None = None
    """In how many bits weights are gathered at stage 3; None as they are. This project's engine alone rounds."""
    gradient_bits: int | None = None
    """In how many bits gradients are reduced from stage 1 on; None as they are."""
    activation_dtype: ActivationType | None = None
    """In which type hidden states and their gradients travel between pipeline ranks; None as they are, in 16 bits."""
    kept: frozenset[tuple[int, int]] = frozenset()
    """The pairs of chunk and micro-batch that recompute "auto" keeps."""
    state: str = "fp32"
    """What the optimizer updates. fp32: copies of the bf16 weights, with moments in fp32. bf16: the weights themselves,
    with gradients and moments in bf16, rounded by chance, which this project's engine alone does, from stage 1 on.
    8bit: copies as with fp32, and moments in 8 bits as bitsandbytes has them, which this project's engine keeps in
    memory, of whole parameters."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, as JSON has them: of what travels rounded, only what does. With recompute "auto", the
        number of pairs of chunk and micro-batch that are recomputed stands for those that are kept."""
        hierarchy = None if self.hierarchy is None else self.hierarchy._asdict()
        again = self.recomputed_pairs if self.recompute == "auto" else None
        sharers = self.home_shared_by if self.keep_frozen == "host" else None
        named = {**asdict(self), "hierarchy": hierarchy, "kept": None, "recomputed_pairs": again}
        named |= {"home_shared_by": sharers}
        absent = (*ROUNDED, "keep_frozen", "home_shared_by", "kept", "recomputed_pairs")
        return {name: value for name, value in named.items() if value is not None or name not in absent}

    def __post_init__(self) -> None:
        if self.overlap_update and self.micro_batch_outer:
            raise ValueError("overlap_update is True, but with micro_batch_outer stock DeepSpeed updates; remove one")
        for field in (
            "data_ranks",
            "pipeline_ranks",
            "tensor_ranks",
            "micro_batch",
            "micro_batches",
            "chunks_per_rank",
            "resident_chunks",
            "expert_ranks",
            "home_shared_by",
        ):
            count(field, getattr(self, field))
        for field, allowed in (("zero_stage", range(4)), ("schedule", PLANNED), ("recompute", RECOMPUTE)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; use one of {', '.join(map(str, allowed))}")
        if self.offload not in OFFLOAD:
            raise ValueError(f"offload is {self.offload!r}; use one of optimizer and parameters, or None")
        if self.offload is not None and (self.schedule != "layered" or self.micro_batch_outer):
            raise ValueError(f"offload is '{self.offload}', which this project's layered schedule has; use that")
        if self.on_disk and self.offload is None:
            raise ValueError("on_disk is True, but nothing is offloaded; set offload, too")
        if self.stores_inputs and (self.schedule != "layered" or self.micro_batch_outer or self.recompute == "none"):
            raise ValueError(
                "stores_inputs is True, which this project's layered schedule has, with recompute 'full'; use both"
            )
        if self.stores_weights and (self.schedule != "layered" or self.micro_batch_outer or self.zero_stage < 3):
            raise ValueError(
                "stores_weights is True, which this project's layered schedule has, with zero_stage 3; use both"
            )
        _refuse_second_parts(self)
        _refuse_to_decide(self)
        if self.data_ranks % self.expert_ranks:
            raise ValueError(
                f"expert_ranks is {self.expert_ranks}, which does not divide the {self.data_ranks} data_ranks; use a "
                "divisor"
            )
        for field, given in (
            ("tensor_ranks", self.tensor_ranks > 1),
            ("micro_batch_outer", self.micro_batch_outer),
            ("hierarchy", self.hierarchy is not None),
        ):
            if self.expert_ranks > 1 and given:
                raise ValueError(
                    f"expert_ranks is {self.expert_ranks}, and {field} {getattr(self, field)}, which is not planned "
                    "together; use expert_ranks 1"
                )
        if self.hierarchy is not None and (
            self.data_ranks % self.hierarchy.node_ranks or not 1 < self.hierarchy.node_ranks < self.data_ranks
        ):
            raise ValueError(
                f"hierarchy.node_ranks is {self.hierarchy.node_ranks}; use a divisor of the {self.data_ranks} "
                "data_ranks that is neither 1 nor all of them"
            )
        _refuse_rounding(self)
        _refuse_homes_of_frozen(self)
        _refuse_state(self)

    @property
    def travel(self) -> Travel:
        """In how many bits weights and gradients travel, as the memory formula has it."""
        return Travel(self.weight_bits, self.weight_bits, self.gradient_bits)

    @property
    def rounds(self) -> bool:
        """Whether something travels rounded, which changes results a little."""
        return any(getattr(self, name) is not None for name in ROUNDED)

    @property
    def keeps_frozen_whole(self) -> bool:
        """Whether no rank gathers frozen weights at stage 3, because each has them all on its device or its host."""
        return self.keep_frozen in ("device", "host")

    @property
    def uses_host(self) -> bool:
        """Whether the host holds something between a step's passes that the GPU would hold."""
        return self.offload is not None or self.stores_inputs

    @property
    def gpus(self) -> int:
        return self.data_ranks * self.pipeline_ranks * self.tensor_ranks

    @property
    def sequences(self) -> int:
        """Sequences per step, over all data-parallel ranks."""
        return self.data_ranks * self.micro_batch * self.micro_batches

    @property
    def chunks(self) -> int:
        return self.pipeline_ranks * self.chunks_per_rank

    @property
    def computes(self) -> int:
        """The number of forwards and backwards in a step of one pipeline."""
        return 2 * self.chunks * self.micro_batches

    @property
    def recomputed_pairs(self) -> int:
        """How many forwards of a step of one pipeline the backward pass computes again."""
        return len(self.spec.recomputed_chunks) * self.micro_batches - len(self.kept)

    def recomputed_share(self, chunk: int) -> float:
        """Returns for which share of the micro-batches the backward computes the chunk again."""
        kept = sum(one == chunk for one, _ in self.kept)
        return 1 - kept / self.micro_batches if chunk in self.spec.recomputed_chunks else 0.0

    @property
    def takes_clock(self) -> bool:
        """Whether the closed form does not know the step: it knows neither hierarchical shards nor the host, nor
        backwards in two parts, nor a vee, nor chunks that are recomputed for some micro-batches."""
        in_parts = self.split_backward > 0 or self.schedule == "zbv" or self.recompute == "auto"
        return self.hierarchy is not None or self.uses_host or self.stores_weights or in_parts

    @cached_property
    def placement(self) -> Placement:
        return place_chunks(default_placement(self.schedule), self.chunks, self.pipeline_ranks)

    @property
    def group(self) -> int:
        """Micro-batches that pass through a chunk together under the layered schedule."""
        return min(self.micro_batch_group or self.micro_batches, self.micro_batches)

    @property
    def spec(self) -> ProgramSpec:
        """What the program of a step is derived from. Raises ValueError if the schedule cannot do it."""
        postpones = self.overlap_update or self.offload is not None
        return ProgramSpec(
            self.placement,
            self.schedule,
            self.micro_batches,
            self.group,
            self.zero_stage,
            self.resident_chunks,
            defers_gathers=postpones and self.zero_stage > 0,
            updates="next_step" if postpones else "step",
            hierarchy=self.hierarchy,
            offload=None if self.offload is None else Offload(self.offload == "parameters", alone=self.data_ranks == 1),
            stores_inputs=self.stores_inputs,
            stores_weights=self.stores_weights,
            recomputes=self.recompute != "none",
            kept=self.kept,
            split_backward=self.split_backward,
        )

    @property
    def shards(self) -> int:
        """Equal parts into which the optimizer's state is cut."""
        if self.hierarchy is not None and self.hierarchy.replicated:
            return self.hierarchy.node_ranks
        return self.data_ranks if self.zero_stage else 1

    def part(self, parameters: float, experts: float = 0.0) -> float:
        """Returns how many parameters a rank updates of those that it has on one tensor-parallel rank, of which
        ``experts`` are those that ranks divide."""
        return parameters / self.shards + experts / (self.data_ranks // self.expert_ranks if self.zero_stage else 1)

    def layers_of_chunks(self, model: Model) -> list[int]:
        """Returns how many layers each chunk has. Raises ValueError if there are fewer layers than chunks."""
        if model.layers < self.chunks:
            raise ValueError(
                f"chunks_per_rank is {self.chunks_per_rank}; {model.layers} layers cannot form {self.chunks} chunks on "
                f"{self.pipeline_ranks} pipeline ranks"
            )
        if self.speeds:
            bounds = split_by_speed(model.layers, self.placement, self.speeds)
        else:
            bounds = split_evenly(model.layers, self.chunks)
        return [end - start for start, end in zip(bounds, bounds[1:])]

    def kinds_of_chunks(self, model: Model) -> list[tuple[int, ...]]:
        """Returns how many layers of each kind every chunk has, in the order of ``model.kinds``."""
        bounds = accumulate(self.layers_of_chunks(model), initial=0)
        return [model.counts_between(start, end) for start, end in pairwise(bounds)]


def _refuse_state(of: Configuration) -> None:
    """Raises ValueError if nothing keeps ``state`` so."""
    if of.state not in STATES:
        raise ValueError(f"state is {of.state!r}; use one of {', '.join(STATES)}")
    if of.state == "bf16" and (of.zero_stage == 0 or of.micro_batch_outer):
        raise ValueError(
            f"state is 'bf16', which this project's engine has with zero_stage 1 to 3, but zero_stage is "
            f"{of.zero_stage} and micro_batch_outer {of.micro_batch_outer}; use 'fp32'"
        )
    for field, wrong in (
        ("micro_batch_outer", of.micro_batch_outer),
        ("tensor_ranks", of.tensor_ranks > 1),
        ("expert_ranks", of.expert_ranks > 1),
        ("on_disk", of.on_disk),
    ):
        if wrong and of.state == "8bit":
            raise ValueError(
                f"state is '8bit', which this project's engine keeps in memory, of whole parameters, but {field} "
                f"is {getattr(of, field)!r}; use 'fp32'"
            )


def _refuse_homes_of_frozen(of: Configuration) -> None:
    """Raises ValueError if the engine refuses ``keep_frozen``."""
    if of.keep_frozen not in KEEP_FROZEN:
        raise ValueError(f"keep_frozen is {of.keep_frozen!r}; use one of {', '.join(map(str, KEEP_FROZEN))}")
    if of.keep_frozen is not None and (of.zero_stage < 3 or of.micro_batch_outer):
        raise ValueError(f"keep_frozen is '{of.keep_frozen}', which zero_stage 3 of this project has; use that")
    if of.keeps_frozen_whole and of.offload == "parameters":
        raise ValueError(
            f"keep_frozen is '{of.keep_frozen}', but offload 'parameters' says where weights lie, too; use 'none'"
        )


def _refuse_second_parts(of: Configuration) -> None:
    """Raises ValueError if backwards shall have two parts where no engine has them, or where that gains nothing."""
    if not of.split_backward:
        return
    count("split_backward", of.split_backward)
    for field, wrong, why in (
        ("micro_batch_outer", of.micro_batch_outer, "stock DeepSpeed does not know"),
        ("pipeline_ranks", of.pipeline_ranks == 1, "fills waits for other pipeline ranks"),
        ("tensor_ranks", of.tensor_ranks > 1, "gains nothing in layers of Megatron-core, which such ranks share"),
        ("offload", of.offload is not None, "is not planned beside it"),
        ("stores_inputs", of.stores_inputs, "is not planned beside it"),
    ):
        if wrong:
            raise ValueError(
                f"split_backward is {of.split_backward}, which {why}, but {field} is {getattr(of, field)!r}; use 0"
            )


def _refuse_to_decide(of: Configuration) -> None:
    """Raises ValueError if a rank shall decide what it recomputes where the engine refuses that."""
    if of.recompute != "auto" and of.kept:
        raise ValueError(f"recompute is '{of.recompute}', but kept has {len(of.kept)} pairs; use 'auto'")
    for field, wrong in (
        ("micro_batch_outer", of.micro_batch_outer),
        ("tensor_ranks", of.tensor_ranks > 1),
        ("expert_ranks", of.expert_ranks > 1),
        ("split_backward", of.split_backward > 0),
    ):
        if wrong and of.recompute == "auto":
            raise ValueError(
                f"recompute is 'auto', which this project's engine has for whole backwards of ranks that share no "
                f"layer, but {field} is {getattr(of, field)!r}; use 'full' or 'none'"
            )


def _refuse_rounding(of: Configuration) -> None:
    """Raises ValueError if something shall travel rounded that the engine does not round."""
    for field, allowed in _BITS.items():
        if getattr(of, field) not in allowed:
            raise ValueError(f"{field} is {getattr(of, field)!r}; use one of {', '.join(map(str, allowed))}")
    if of.rounds and of.micro_batch_outer:
        raise ValueError("micro_batch_outer is True, which is stock DeepSpeed's way; use it with exact travel alone")
    if of.weight_bits is not None and of.zero_stage < 3:
        raise ValueError(f"weight_bits is {of.weight_bits}, which weights have in gathers of zero_stage 3; use that")
    if of.gradient_bits is not None and of.zero_stage == 0:
        raise ValueError(f"gradient_bits is {of.gradient_bits}, but zero_stage 0 sums exact gradients; use 1 to 3")
    if of.activation_dtype is not None and of.pipeline_ranks == 1:
        raise ValueError(
            f"activation_dtype is '{of.activation_dtype}', but one pipeline rank sends no hidden states; use None"
        )
    if any(of.travel) and (of.hierarchy is not None or of.expert_ranks > 1):
        raise ValueError(
            "weight_bits or gradient_bits is set, but shards of nodes and divided experts travel exactly; use None"
        )
