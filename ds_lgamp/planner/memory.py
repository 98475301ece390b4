"""How much memory a configuration needs on the GPU that needs most.

``ds_lgamp/cost/memory.py`` has the project's memory formula, which follows the program of a rank. A search asks for
thousands of configurations, so this module evaluates the same formula at a few moments in closed form:

- a backward at which the rank may store most, such as the first of each visit to a chunk;
- a wait for a reduction of a chunk that may have an end of the model;
- the last forward of a micro-batch group, and the end of the step.

The result is within 4 % of the formula, or within three messages where those are more (tests/planner/test_memory.py).
Programs for a GPU post receives later than the others, so they may need less. Hierarchical shards, postponed
updates, offloading and layers by speed have no closed form here: their programs are followed.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from ds_lgamp.planner.activations import Software, layer_bytes
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.gradients import Gradients, RankUnit
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.order import Order
from ds_lgamp.planner.sizes import (
    as_executed,
    chunks_of,
    default_software,
    followed,
    own_chunks,
    units_of,
)
from ds_lgamp.schedule.spec import RECEIVES_POSTED, SENDS_IN_FLIGHT

_ID_BYTES = 8
"""Bytes of a token id, and of a label."""


class ConfigurationMemory(NamedTuple):
    """Bytes on the GPU that needs most, by kind, at the moment when it needs most."""

    weights: int
    """Held between steps."""
    master_weights: int
    optimizer_state: int
    gradients: int
    """What the optimizer reads."""
    gathered_weights: int = 0
    """At stage 3, of resident chunks."""
    gradient_buffers: int = 0
    """Full gradients before and during their reductions."""
    stored: int = 0
    """Inputs of chunks or, without recomputation, all that autograd keeps. Also what one chunk of a rank hands to
    another one."""
    messages: int = 0
    """Sends and receives of the pipeline under way."""
    working: int = 0
    """Of the backward or update that runs."""
    batch: int = 0
    """Token ids, labels and tables of rotary positions of all micro-batches."""

    pipeline_rank: int = 0
    """The rank that needs most."""
    host: int = 0
    """Bytes on its host for each GPU, with offloading. No part of the total."""

    @property
    def kinds(self) -> dict[str, int]:
        """The bytes on the GPU by name."""
        return {name: size for name, size in self._asdict().items() if name not in ("pipeline_rank", "host")}

    @property
    def total(self) -> int:
        return sum(self[:-2])

    def fits(self, cluster: Cluster) -> bool:
        """Whether a GPU of ``cluster`` and its host have enough."""
        return self.missing(cluster) == 0 and self.host <= cluster.host.memory

    def missing(self, cluster: Cluster) -> float:
        """Returns the bytes that a GPU of ``cluster`` lacks; 0 if it has enough."""
        return max(0.0, self.total - cluster.memory)


def memory(model: Model, configuration: Configuration, software: Software | None = None) -> ConfigurationMemory:
    """Returns what the GPU that needs most memory needs.

    Args:
        software: what trains the model; by default what :mod:`ds_lgamp.planner.write` starts.
    """
    software = default_software(configuration) if software is None else software
    configuration = as_executed(model, configuration)
    # The ranks between rank 1 and the last one store fewer inputs than rank 1, and have no more layers.
    ranks = sorted({0, min(1, configuration.pipeline_ranks - 1), configuration.pipeline_ranks - 1})
    if configuration.speeds:
        ranks = list(range(configuration.pipeline_ranks))
    special = configuration.hierarchy is not None or configuration.overlap_update or bool(configuration.speeds)
    special = special or configuration.uses_host
    find = _followed if special else of_rank
    needs = [find(model, configuration, software, rank) for rank in ranks]
    most = max(needs, key=lambda need: need.total)
    return most._replace(host=max(need.host for need in needs))


def of_rank(model: Model, configuration: Configuration, software: Software, rank: int) -> ConfigurationMemory:
    """Returns what a pipeline rank needs when it needs most."""
    moments = _Rank(model, configuration, software, rank).moments()
    return max(moments, key=lambda moment: moment.total)


def _followed(model: Model, configuration: Configuration, software: Software, rank: int) -> ConfigurationMemory:
    """Returns what a pipeline rank needs by its program. What is held for a part of the step counts as working."""
    told = followed(model, configuration, rank, software)
    inputs = 0 if told.activations is None else told.activations.on_host
    held = told.weights, told.master_weights, told.optimizer_state or 0, told.gradients
    return ConfigurationMemory(
        *held,
        working=told.peak - sum(held),
        batch=batch_bytes(model, configuration, software),
        pipeline_rank=rank,
        host=inputs + (0 if told.host is None else told.host.peak),
    )


def batch_bytes(model: Model, configuration: Configuration, software: Software) -> int:
    """Returns the bytes of all micro-batches before they are embedded. Models of transformers compute a sine and a
    cosine for every position and micro-batch."""
    per_token = 2 * _ID_BYTES * configuration.micro_batch
    if not model.position_embeddings and not software.fused:
        per_token += 2 * software.element.weights * model.head_size
    return per_token * model.sequence_length * configuration.micro_batches


def _visited(order: Order, sums: list[int], computes: int) -> int:
    """Returns what the first so many forwards or backwards of a rank add up to.

    Args:
        sums: of one compute of each of the first so many chunks, in the order of the computes.
    """
    rounds, rest = divmod(computes, order.round * order.chunks)
    chunks, begun = divmod(rest, order.round)
    whole = order.round * (rounds * sums[-1] + sums[chunks])
    return whole + (begun * (sums[chunks + 1] - sums[chunks]) if begun else 0)


class _Rank:
    """A pipeline rank at the moments when it may need most. Chunks are numbered on the rank."""

    def __init__(self, model: Model, configuration: Configuration, software: Software, rank: int) -> None:
        self.configuration, self.software, self.element, self.rank = configuration, software, software.element, rank
        own, stage, data_ranks = own_chunks(configuration, rank), configuration.zero_stage, configuration.data_ranks
        self.sizes = chunks_of(model, configuration, software, own)
        spec = configuration.spec
        self.recomputed = [spec.is_recomputed(chunk) for chunk in own]
        self.has_input = [chunk > 0 for chunk in own]
        self.result = layer_bytes(model, configuration.micro_batch, configuration.tensor_ranks, software).result
        self.units = []
        for unit in units_of(model, configuration, rank):
            part, parts = unit.part(stage, data_ranks), unit.parts(stage, data_ranks)
            users = own.index(unit.chunks[0]), own.index(unit.chunks[-1])
            self.units.append(RankUnit(*users, part, part * parts, unit.copies))
        self.gradients = Gradients(configuration, software, self.units, len(own))
        self.part, self.full = sum(unit.part for unit in self.units), sum(unit.full for unit in self.units)
        self.batch = batch_bytes(model, configuration, software)
        kept = [self.kept_by(chunk) for chunk in range(len(own))]
        self.kept, self.kept_backwards = ([0, *accumulate(each)] for each in (kept, reversed(kept)))
        """What the first so many chunks store of a micro-batch, in the order of forwards and in that of backwards."""

    def kept_by(self, chunk: int) -> int:
        """Returns what a forward of ``chunk`` stores."""
        if self.copies_input(chunk):
            return self.result
        return 0 if self.recomputed[chunk] else self.sizes[chunk].saved

    def moments(self) -> Iterator[ConfigurationMemory]:
        """Yields the memory at each moment that may be the worst."""
        for micro_batches, earlier, final in self.groups():
            order = Order(self.configuration, self.rank, micro_batches)
            if earlier and self.gradients.reduces_every_group:
                yield self.last_forward(order, earlier, final)
            for number in order.turning_points():
                yield self.backward(order, number, earlier, final)
            if order.total == order.round * order.chunks:
                yield from self.waits(order, earlier, final)
        yield from self.end()

    def groups(self) -> Iterator[tuple[int, int, bool]]:
        """Yields micro-batch groups that may need most: their size, how many precede, and whether none follows."""
        micro_batches, group = self.configuration.micro_batches, self.configuration.group
        earlier = -(-micro_batches // group) - 1
        if earlier:
            yield group, earlier - 1, False
        yield micro_batches - earlier * group, earlier, True

    def last_forward(self, order: Order, earlier: int, final: bool) -> ConfigurationMemory:
        """Returns the memory during the last forward ahead of all backwards of a group. None has waited for the
        reductions of the group before."""
        forwards = order.forwards(0) - 1
        chunk = order.forward_chunk(forwards)
        gradients, buffers = self.gradients.held(-1, earlier - 1, True)
        gathered = self.gathered(order.next_chunks(0, self.configuration.resident_chunks, again=not final))
        stored, messages = self.stored(order, forwards, 0), self.messages(order, 0, earlier, final)
        working = self.sizes[chunk].forward + (self.result if self.has_input[chunk] else 0)
        return self.moment(gradients, buffers, gathered, stored, messages, working)

    def backward(self, order: Order, number: int, earlier: int, final: bool) -> ConfigurationMemory:
        """Returns the memory during a backward.

        Args:
            number: how many others of the group precede it.
            earlier: how many groups precede.
            final: whether no other group follows.
        """
        chunk, per_round = order.backward_chunk(number), order.round * order.chunks
        stored = self.stored(order, order.forwards(number), number)
        messages = self.messages(order, number, earlier, final)
        resident = order.next_chunks(number, self.configuration.resident_chunks, again=not final)
        is_last_round = final and number >= order.total - per_round
        gradients, buffers = self.gradients.held(chunk, earlier or number // per_round, is_last_round)
        working = self.sizes[chunk].backward + (self.result if self.copies_input(chunk) else 0)
        return self.moment(gradients, buffers, self.gathered(resident), stored, messages, working)

    def waits(self, order: Order, earlier: int, final: bool) -> Iterator[ConfigurationMemory]:
        """Yields the memory when a backward awaits a reduction of the group before, the oldest or that of the rank's
        first chunk, or in its own group that of the rank's last chunk. First and last chunks may have an end of the
        model."""
        last, waiting, most = order.chunks - 1, [], self.gradients.most_full
        if final and not earlier or self.gradients.reduces_every_group:
            waiting.append((last - most, last, earlier == 0))
        if earlier and self.gradients.reduces_every_group:
            waiting += {(last, most - 1, earlier == 1), (last + 1 - most, 0, earlier == 1)}
        for chunk, awaited, new in waiting:
            if chunk < 0:
                continue
            number = (last - chunk) * order.round
            gradients, buffers = self.gradients.held(chunk, earlier, final, begun=False)
            gathered = self.gathered(order.next_chunks(number, self.configuration.resident_chunks, again=not final))
            stored = self.stored(order, order.forwards(number), number)
            messages = self.messages(order, number, earlier, final)
            units = [unit for unit in self.units if unit.first == awaited]
            for held, rest, finishing in self.gradients.finishing(units, gradients, buffers, new):
                yield self.moment(held, rest, gathered, stored, messages, finishing)

    def end(self) -> Iterator[ConfigurationMemory]:
        """Yields the memory after the last backward, when the first of the last reductions ends, and when the optimizer
        steps."""
        configuration, element = self.configuration, self.element
        micro_batches, sent = configuration.micro_batches, self.sends(self.configuration.micro_batches)
        is_interleaved = configuration.schedule == "interleaved_1f1b"
        together = configuration.pipeline_ranks if is_interleaved else configuration.group
        earlier = -(-micro_batches // together) - 1
        gradients, buffers = self.gradients.held(-1, earlier, True)
        yield self.moment(gradients, buffers, self.gathered([0]), 0, sent, 0)
        reduces = self.gradients.reduces_every_group
        outstanding = range(len(self.sizes) if earlier and not reduces else self.gradients.most_full)
        awaited = [unit for unit in self.units if unit.first in outstanding]
        new = not (earlier and reduces)
        for held, rest, finishing in self.gradients.finishing(awaited, gradients, buffers, new):
            yield self.moment(held, rest, 0, 0, sent, finishing)
        gradients = element.master * self.part
        if not self.gradients.partitioned and element.gradients != element.master:
            gradients += element.gradients * self.part
        copies = max((unit.copies * unit.part for unit in self.units if unit.copies > 1), default=0)
        yield self.moment(gradients, 0, 0, 0, sent, element.master * copies)

    def moment(
        self, gradients: int, buffers: int, gathered: int, stored: int, messages: int, working: int
    ) -> ConfigurationMemory:
        element, weights = self.element, self.part if self.configuration.zero_stage == 3 else self.full
        return ConfigurationMemory(
            weights=element.weights * weights,
            master_weights=element.master * self.part if element.weights < element.master else 0,
            optimizer_state=(element.optimizer or 0) * self.part,
            gradients=gradients,
            gathered_weights=gathered,
            gradient_buffers=buffers,
            stored=stored,
            messages=messages,
            working=working,
            batch=self.batch,
            pipeline_rank=self.rank,
        )

    def copies_input(self, chunk: int) -> bool:
        """Whether a backward computes ``chunk`` again, from a copy of its stored input."""
        return self.recomputed[chunk] and self.has_input[chunk]

    def stored(self, order: Order, forwards: int, backwards: int) -> int:
        """Returns what so many forwards have stored and so many backwards have not freed."""
        stored = _visited(order, self.kept, forwards) - _visited(order, self.kept_backwards, backwards)
        if self.configuration.pipeline_ranks == 1:
            # Results that no forward has taken yet, and gradients that no backward has taken yet.
            first, last = 0, order.chunks - 1
            waiting = order.forwards_of(first, forwards) - order.forwards_of(last, forwards)
            waiting += order.backwards_of(last, backwards) - order.backwards_of(first, backwards)
            stored += self.result * waiting
        return stored

    def gathered(self, resident: list[int]) -> int:
        """Returns the bytes of gathered weights while the chunks ``resident`` are whole."""
        if not self.gradients.partitioned or self.configuration.zero_stage < 3:
            return 0
        whole = (unit.full for unit in self.units if unit.first in resident or unit.last in resident)
        return self.element.weights * sum(whole)

    def messages(self, order: Order, backwards: int, earlier: int, final: bool) -> int:
        """Returns the bytes of messages under way during a backward that follows ``backwards`` others of its group."""
        last, forwards = self.configuration.pipeline_ranks - 1, order.forwards(backwards)
        if last == 0:
            return 0
        # The window of the link that closes the ring is larger, because messages pile up there. The window of gradients
        # begins with this backward, that of results after the last forward.
        wide = max(RECEIVES_POSTED, order.micro_batches - last + 1)
        results = (wide if self.rank == 0 else RECEIVES_POSTED) - 1
        gradients = wide if self.rank == last else RECEIVES_POSTED
        left = order.total - backwards
        posted = [min(results, order.total - forwards), min(gradients, left)]
        if not final:
            # Receives of the next group are posted too, if its forwards, or the backwards between them, are near.
            later = order.chunks * (self.configuration.micro_batches - (earlier + 1) * order.micro_batches)
            near = [2 * results + 1 - left, (2 * gradients - left - order.forwards(0)) // 2]
            posted[0] += max(0, min(near[0], later, results - posted[0]))
            posted[1] += max(0, min(near[1], later, gradients - posted[1]))
        # The first chunk of the model receives no results, and the last one no gradients.
        if self.rank == 0:
            posted[0] -= order.forwards_of(0, forwards + posted[0]) - order.forwards_of(0, forwards)
        if self.rank == last:
            posted[1] -= order.backwards_of(order.chunks - 1, backwards + posted[1])
            posted[1] += order.backwards_of(order.chunks - 1, backwards)
        return self.sends(earlier * order.micro_batches + backwards) + self.result * sum(posted)

    def sends(self, backwards: int) -> int:
        """Returns the bytes of messages that are still under way after so many backwards."""
        chunks, last = len(self.sizes), self.configuration.pipeline_ranks - 1
        # How many chunks of the rank send results to the next rank, and gradients to the one before.
        onward, back = (0, 0) if last == 0 else (chunks - (self.rank == last), chunks - (self.rank == 0))
        sent = (onward * self.configuration.micro_batches, back * backwards)
        return self.result * sum(min(SENDS_IN_FLIGHT, number) for number in sent)
