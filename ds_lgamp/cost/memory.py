"""The memory formula: predicts the bytes on one pipeline rank by following its program.

A **unit** is gathered, released and reduced together. It holds the trainable or the frozen parameters of one chunk or
of one tied module; experts that ranks divide are a unit of their own. Symbols:

- W: data-parallel ranks that have the unit. Where E of them divide experts, 1/E of all have the same ones.
- S: equal parts of a unit's storage. S is W at stages 1, 2 and 3, and 1 at stage 0.
- m: elements of one part, as ``units.py`` counts them.
- T: pipeline ranks that hold a copy of a tied unit.
- w: bytes per element of a weight. Of packed bytes, those of the type that they are stored in.
- g: bytes per element of a gradient that accumulates.
- c: bytes per element of a gradient that travels between data-parallel ranks. c is g unless gradients travel in another
  type.
- u: bytes per element of a master weight, the larger of w and 4, or w if the optimizer updates the weights themselves.
- s: bytes per element of a sum of gradients over ranks or groups of micro-batches, the larger of u and g.

**State**, summed over the units of the rank. Frozen units have only the first two kinds.

- weights: w S m; at stage 3 w m.
- resident weights, at stage 3 with S > 1: w S m from gather to release. A tied unit stays while any of its users does.
- master weights: u m if w < u.
- optimizer state: for the elements that the optimizer owns, at most m.
- gradients, S > 1: s m from the reduction on, and u m once they are final, to the end of the step or to UPDATE. An
  update that the step left to the next one keeps its u m until then, beside the forwards of lower chunks.
- gradients, S = 1: g m all the time.
  - If gradients travel in another type: c m more from the reduction on.
  - If c or g is not u: u m during STEP, or from STEP to UPDATE, in place of those c m.
- gradient buffers, S > 1:
  - g S m from the first backward until the reduction begins.
  - c S m from then until the reduction is awaited. If the types differ, both exist for a moment.
  - c m received while the reduction is under way; c S m if an all-to-all replaces the reduce-scatter.
  - s m at the end of the reduction, if c differs from s or this rank sums the parts.
- gradient buffers, stage 0 with W > 1, if gradients add up in rank order: c m from the reduction until it is awaited,
  and c m / W at its end.
- copies of a tied unit: s T m during STEP, one unit after another.
- temporary memory of the optimizer: for one unit's part after another, or for all parts together. An UPDATE takes it
  for one unit. Muon steps on all units together and takes what ``muon.py`` says. One that rounds by chance takes copies
  in fp32 of weights, gradients and optimizer state of a block of elements at most, and all the time random numbers.

Where weights (stage 3) or gradients (stages 1 to 3) travel rounded, with q bytes per element as ``units.py`` counts:

- resident weights: q (S + 1) m more from the gather until it is awaited.
- gradient buffers: from the reduction until it is awaited 2 q S m, in place of what else travels and is received; then
  2 s m for a moment.

With hierarchical shards over nodes of h ranks, S is W; it is h if nodes are replicas, and for frozen units. A
rank keeps the weights of n = S m / h elements. The rest is as above, but

- weights: w n.
- gradient buffers: the reduction inside the node receives c n, or c S m by an all-to-all. Its sum takes s n until it is
  combined with other nodes' sums. Then c n travel until that is awaited, a copy if c differs from s. Meanwhile c m are
  received, or c n by an all-to-all; nothing where nodes are replicas, but c n and at the end c n h / W in rank order.
  At the end s m more, or nothing where what was received or travelled is the sum itself.

With offloading, what follows replaces the rows above.

- weights on the device: w S m at stages 1 and 2, w m at stage 3; none if the host holds the parameters.
- loaded weights, if the host holds the parameters and S > 1: w m from LOAD to the end of the gather, frozen units too.
- resident weights, if the host holds the parameters and S = 1: w m from LOAD to release.
- gradients on the device, S > 1: s m from the reduction to STORE, then u m until WAIT_STORE.
- gradients on the device, S = 1: g m from the first backward to STORE, then u m until WAIT_STORE.
- gradients of what several chunks share: until STEP, which stores them one after another.
- nothing else of the optimizer on the device.
- weights on the host: w m where w < u, and of frozen units if the host holds the parameters. Loads copy from there or,
  where w = u, from the master weights.
- master weights on the host: u m, also where w = u. Gradients, to which stores copy: u m. Both all the time.
- optimizer state and its temporary memory on the host: as above. Updates run one after another.

Frozen units that every rank keeps whole have S = 1, at any W. Those on the device take their weights, w m, alone. Those
on the host take w m there, and on the device w m from gather to release.

Gathered weights that wait on the host, w S m of each unit, take that memory of the host all the time. On the device
they are resident weights from LOAD_W to release, as from a gather.

A load moves a unit that is neither gathered nor loaded. A tied unit is loaded with the first of its users that needs
it, or by its gather if another user held it at the time of the load and has released it since.

The program says when a reduction is awaited. The reduction of a tied unit is awaited with that of its last user, or
when the backward of another user begins. Stage 1 keeps the gradients of all chunks from the first micro-batch group to
the last.

**Activations**, summed over micro-batches.

- batch, on a rank that owns an end of the model: inputs and labels of all micro-batches, until chunk 0, or else the
  last chunk, takes them.
  - The rank of chunk 0 then keeps the inputs until the backward of chunk 0; without recomputation, until its forward.
  - The rank of the last chunk then keeps the labels until the backward of the last chunk.
- inputs of chunks, with recomputation: from the forward to the end of the backward. If they wait on the host, they are
  not on the device from WAIT_STORE_A to LOAD_A, and take memory of the host from STORE_A to WAIT_LOAD_A.
- handed over: results, and gradients of results, from their compute until another chunk of the same rank takes them.
- receives: from when they are posted until they are taken.
- sends: from the compute of the tensor until the send is awaited. Two per link and kind stay under way until the end of
  the batch.
- saved, without recomputation: tensors that autograd keeps from the forward to the backward.
- working memory: the peak of the running forward or backward beside all that, and the tensor it computes on.
  - With recomputation, this tensor is a copy of the input.
  - Without recomputation, a forward computes on the input itself. It computes on a copy if the input is the result of a
    chunk on the same rank that is not recomputed either.
- random states, with recomputation: one set, and one more for every stored input if layers draw.

A last chunk whose backwards directly follow its forwards is never recomputed. Any other may be recomputed for some
micro-batches and not for others. Each takes what its actions say. Where layers recompute by themselves, as in
Megatron-LM's loop, "recomputation" above is that of whole chunks: all takes are those without it, and ``saved`` is what
layers leave, in one way or the other.

Source: ``ds_lgamp/partition`` and ``ds_lgamp/runtime``; tests compare both with this formula. It holds from the second
step on, because the first one learns shapes, and while shapes do not change. It does not cover:

- scalars and buffers of layers, and tensors that they keep in attributes, such as the loss that balances experts, whose
  graph holds the input of its chunk.
- the copy of labels from which a recomputation computes the loss.
- memory inside a kernel, and of the fp32 numbers between weights or gradients and what travels of them rounded: at most
  10 bytes for each element of an eighth of a unit, or of one part if that is more.
- data that the script itself holds.
- the place of micro-batches: beside a GPU, they wait in the host's memory.
- members of a result that have no gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_lgamp.cost.activations import ActivationBytes, ActivationMemory, ActivationWalk
from ds_lgamp.cost.offload import (
    HostMemory,
    OffloadedStateWalk,
    StayingStateWalk,
    device_weights,
    host_memory,
)
from ds_lgamp.cost.state import Ledger, StateWalk, Step, held_between_steps
from ds_lgamp.cost.traffic import weights_on_host
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize, on_host, stays
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.simulate import peak_live_activations
from ds_lgamp.schedule.spec import Offload


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank by kind, each at its peak in a step."""

    weights: int
    """Held between steps."""
    resident_weights: int
    loaded_weights: int
    """Parts that came from the host and are being gathered, with offloaded parameters."""
    master_weights: int
    optimizer_state: int | None
    """On the first data-parallel rank, which has the most; None if unknown."""
    gradients: int
    """Gradients that the optimizer step reads."""
    gradient_buffers: int
    """Full gradients and the receive buffers of their reductions."""
    tied_copies: int
    update: int | None
    """Temporary memory of the optimizer; None if unknown."""
    peak: int
    """The peak of all kinds together, without unknown ones."""
    at_peak: Mapping[str, int]
    """What the step holds at that peak beside weights, master weights and optimizer state, by kinds of the ledger."""
    stored_activations: int
    """The most forwards, one per chunk and micro-batch, whose backward is still to come; a number, not bytes. With full
    recomputation so many chunk inputs are stored, except inputs of a last chunk that turns at once."""
    activations: ActivationMemory | None
    """None if shapes are unknown."""
    host: HostMemory | None = None
    """What offloading, frozen and gathered weights take on the host; the other numbers are then those of the device.
    None if nothing waits there."""


def rank_memory(
    actions: Sequence[Action],
    units: Sequence[UnitSize],
    sharding: Sharding,
    size: ElementBytes,
    activation_bytes: ActivationBytes | None = None,
    step: int | None = None,
    offload: Offload | None = None,
) -> Memory:
    """Predicts the memory of a pipeline rank that runs ``actions``, the program of a training step.

    Args:
        units: the units of the rank.
        activation_bytes: None if shapes are unknown; the peak then excludes activations.
        step: temporary memory of an optimizer that steps on all units together, in place of ``size.update``.
        offload: as in the program.
    """
    return memory_over_time(actions, units, sharding, size, activation_bytes, step, offload)[0]


def memory_over_time(
    actions: Sequence[Action],
    units: Sequence[UnitSize],
    sharding: Sharding,
    size: ElementBytes,
    activation_bytes: ActivationBytes | None = None,
    step: int | None = None,
    offload: Offload | None = None,
) -> tuple[Memory, list[int]]:
    """Returns what :func:`rank_memory` does, and the peak of all kinds together during each action."""
    ledger = Ledger()
    walks: list[StateWalk | ActivationWalk] = []
    staying, leaving = [unit for unit in units if stays(unit, offload)], on_host(units, offload)
    waiting = [unit for unit in staying if unit.whole_on == "host"]
    weights, master, optimizer = held_between_steps(staying, sharding, size)
    gathered = weights_on_host(actions, units, sharding, size)
    host = host_memory([*leaving, *waiting], offload, sharding, size, step) if offload or waiting or gathered else None
    if host is not None:
        host = replace(host, gathered=gathered, peak=host.peak + gathered)
    update_unknown = size.update is None and step is None
    if offload is None:
        walks.append(StateWalk(actions, staying, sharding, size, ledger, step))
    else:
        weights += device_weights(leaving, offload, sharding, size)
        update_unknown = update_unknown and any(not unit.frozen for unit in staying)
        walks.append(OffloadedStateWalk(offload, actions, leaving, sharding, size, ledger))
        walks.append(StayingStateWalk(actions, staying, sharding, size, ledger, step))
    activations = None if activation_bytes is None else ActivationWalk(actions, activation_bytes, ledger)
    if activations is not None:
        walks.append(activations)
    steps: dict[Kind, list[Step]] = {kind: [] for kind in Kind}
    for walk in walks:
        for kind, follow in walk.steps.items():
            steps[kind].append(follow)
    always, during = weights + master + (optimizer or 0), []
    for action in actions:
        ledger.lately = ledger.together
        for follow in steps[action.kind]:
            follow(action)
        during.append(always + ledger.lately)
    memory = Memory(
        weights=weights,
        resident_weights=ledger.most["resident"],
        loaded_weights=ledger.most["loaded"],
        master_weights=master,
        optimizer_state=optimizer,
        gradients=ledger.most["gradients"],
        gradient_buffers=ledger.most["buffers"],
        tied_copies=ledger.most["copies"],
        update=None if update_unknown else ledger.most["update"],
        peak=always + ledger.most_together,
        at_peak=ledger.at_peak,
        stored_activations=peak_live_activations(actions),
        activations=None if activations is None else activations.memory(),
        host=host,
    )
    return memory, during
