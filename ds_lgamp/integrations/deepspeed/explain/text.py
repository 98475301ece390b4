"""Writes the explanation as text."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from ds_lgamp.config import BLOCK
from ds_lgamp.cost.activations import ActivationMemory
from ds_lgamp.cost.offload import HostMemory
from ds_lgamp.cost.units import aligned, packed_bytes
from ds_lgamp.fields import with_unit
from ds_lgamp.integrations.deepspeed.engine.memory import LATER
from ds_lgamp.integrations.deepspeed.explain.facts import Explanation, TokenFacts
from ds_lgamp.schedule.actions import STARTED
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.report import table

_BUS = 31.5e9
"""Bytes per second in one direction of PCIe 4.0 x16."""


def as_text(facts: Explanation) -> str:
    """Returns the explanation as tables and sentences."""
    moved, held = (_traffic_table, _token_table), (_memory_table, _shared_table, _host_table, _disk_table, _live_table)
    parts = (_header, _chunk_table, *moved, *held, _activation_table, _words)
    return "\n\n".join(text for part in parts if (text := part(facts)))


_UPDATES = {"reduction": ", each update after its reduction", "next_step": ", each update in the next step", "step": ""}
_KEPT = {"none": "", "device": ", frozen weights whole on the device", "host": ", frozen weights whole on the host"}


def _header(facts: Explanation) -> str:
    spec = facts.spec
    together = spec.micro_batch_group >= spec.micro_batches
    group = "all together" if together else f"in groups of {spec.micro_batch_group}"
    if spec.returns_outputs:
        group = f"forward call by call, {spec.pipeline_ranks} in each, and backward {group}"
    sliced = facts.tensor_ranks > 1
    slices = f" x {facts.tensor_ranks} tensor-parallel" if sliced else ""
    each = " on each tensor-parallel rank" if sliced else ""
    compiled = "" if facts.settings.compile is False else ", compiled"
    parts = ", backwards in two parts" if spec.split_chunks else ""
    computed = f"recompute {facts.settings.recompute}{_budget(facts)}{compiled}{parts}"
    return (
        f"{spec.pipeline_ranks} pipeline x {facts.data_ranks} data-parallel{slices} ranks, schedule {spec.schedule}, "
        f"placement {facts.placement}, ZeRO stage {spec.zero_stage}{_shards(spec)}, {facts.precision}\n"
        f"{spec.micro_batches} micro-batches {group}, {spec.resident_chunks} resident chunks, "
        f"{computed}, optimizer {facts.optimizer}{_UPDATES[spec.updates]}{_on_host(spec)}\n"
        f"{facts.layers} layers in {spec.chunks} chunks{_frozen(spec)}, {facts.parameters:,} parameters{each}"
        f"{_KEPT[facts.home_of_frozen]}{', gathered again from the host' if spec.stores_weights else ''}"
        f"{_by_speed(facts)}{_rounded(facts)}"
    )


def _budget(facts: Explanation) -> str:
    """Returns words on what is recomputed within a budget; nothing if there is none."""
    if facts.settings.recompute != "auto":
        return ""
    within = f" within {facts.settings.recompute_memory or 'the memory of the device'}"
    if facts.activations_unknown is not None:
        return f"{within} (here as in the first batch, which recomputes all and measures)"
    share = ", ".join(
        f"{rank.recomputed} of {len(rank.chunks) * facts.spec.micro_batches}"
        f"{f' and a part of {rank.recomputed_in_part} more' if rank.recomputed_in_part else ''}"
        for rank in facts.ranks
    )
    return f"{within} (forwards by rank: {share})"


def _rounded(facts: Explanation) -> str:
    """Returns a line on what travels rounded; nothing if nothing does."""
    bits = {f"{kind} in {bits} bits": bits for kind, bits in _travelling(facts)}
    if not any(facts.travel):
        return ""
    if facts.data_ranks == 1:
        return "\nzero_quantized_... rounds nothing: there is one data-parallel rank, and nothing travels"
    sizes = (
        f"{kind}, {packed_bytes(aligned(1), bits) / aligned(1):g} bytes per element" for kind, bits in bits.items()
    )
    return f"\ntravel rounded, in blocks of {aligned(1)}: {'; '.join(sizes)}"


def _travelling(facts: Explanation) -> Iterator[tuple[str, int]]:
    """Yields what travels rounded, and in how many bits."""
    weights, frozen, gradients = facts.travel
    if weights is not None:
        yield "weights", weights
    elif frozen is not None and facts.home_of_frozen == "none":
        yield "frozen weights", frozen
    if gradients is not None:
        yield "gradients", gradients


def _frozen(spec: ProgramSpec) -> str:
    """Returns words on chunks without a backward; nothing if there are none."""
    if not spec.first_trained:
        return ""
    return f", of which the first {spec.first_trained} are frozen and go forward only"


def _on_host(spec: ProgramSpec) -> str:
    """Returns words on what the host holds; nothing without offloading."""
    if spec.offload is None:
        return ""
    staying = len(spec.offload.on_device)
    but_for = f" but for {staying} of {spec.chunks} chunks" if staying else ""
    return f", on the host{', as parameters are' if spec.offload.parameters else ''}{but_for}"


def _shards(spec: ProgramSpec) -> str:
    """Returns words on how shards are spread over nodes; nothing without hierarchical shards."""
    if spec.hierarchy is None:
        return ""
    kind = "replicated" if spec.hierarchy.replicated else "refreshed"
    return f" with shards {kind} between nodes of {spec.hierarchy.node_ranks} ranks"


def _by_speed(facts: Explanation) -> str:
    """Returns lines on what follows the speeds of ranks; nothing if these are equal."""
    text = ""
    if facts.settings.pipeline_rank_speeds is not None:
        text += f"\nlayers by the speeds of pipeline ranks, {_numbers(facts.settings.pipeline_rank_speeds)}"
    if facts.settings.data_rank_speeds is not None:
        text += (
            f"\nmicro-batches by the speeds of data-parallel ranks, {_numbers(facts.settings.data_rank_speeds)}: "
            f"{_numbers(facts.micro_batch_shares)}; what follows is for a rank with {facts.spec.micro_batches}"
        )
    return text


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _chunk_table(facts: Explanation) -> str:
    rows = []
    for rank in facts.ranks:
        for chunk in rank.chunks:
            layers = f"{chunk.first_layer}-{chunk.last_layer}" if len(chunk.layer_types) > 1 else str(chunk.first_layer)
            types = ", ".join(_compressed(chunk.layer_types))
            rows.append([rank.pipeline_rank, f"chunk {chunk.chunk}", layers, types, chunk.parameters])
        for tied in rank.tied:
            users = "chunk " + ", ".join(map(str, tied.chunks))
            rows.append([rank.pipeline_rank, f"tied {tied.key}", users, tied.layer_type, tied.parameters])
        rows.append([rank.pipeline_rank, "all", "", "", rank.parameters])
    return table(["rank", "part", "layers", "types", "parameters"], rows, left={1, 2, 3})


def _compressed(names: Sequence[str]) -> list[str]:
    runs = [(name, len(list(members))) for name, members in itertools.groupby(names)]
    return [name if count == 1 else f"{name} x {count}" for name, count in runs]


def _traffic_table(facts: Explanation) -> str:
    titles = ["rank", "gathers", "reduces", *(["expert gathers", "expert reduces"] if facts.divides_experts else [])]
    titles += ["tied gathers", "tied reduces", "tied sums", "frozen gathers", "messages"]
    between = ["refreshes", "combines"] if facts.spec.hierarchy is not None else []
    rows = []
    for rank in facts.ranks:
        moved = rank.traffic
        of_chunks, of_tied = [moved.gathers, moved.reduces], [moved.tied_gathers, moved.tied_reduces, rank.tied_sums]
        of_experts = [moved.expert_gathers, moved.expert_reduces] if facts.divides_experts else []
        counts = [*of_chunks, *of_experts, *of_tied, moved.frozen_gathers, moved.sends]
        sent = [_size(rank.collective_bytes_sent)]
        if rank.bytes_between_nodes is not None:
            counts += [moved.refreshes, moved.combines]
            sent.append(_size(rank.bytes_between_nodes))
        if rank.bus_bytes_loaded is not None and rank.bus_bytes_stored is not None:
            sent += [_size(rank.bus_bytes_loaded), _size(rank.bus_bytes_stored)]
        rows.append([rank.pipeline_rank, *counts, *sent])
    rounds = facts.settings.activation_dtype is not None and facts.ranks[0].hop_bytes is not None
    if rounds:
        for row, rank in zip(rows, facts.ranks):
            row.append(_size(rank.hop_bytes or 0))
    titles += [*between, "collectives send", *(["between nodes"] if between else [])]
    titles += ["from the host", "to the host"] if facts.ranks[0].bus_bytes_loaded is not None else []
    titles += [f"results in {facts.settings.activation_dtype}"] if rounds else []
    return "Each step, each rank\n" + table(titles, rows)


def _token_table(facts: Explanation) -> str:
    titles = ["layers", "all-to-alls", "each token", "numbers of tokens", "each micro-batch", "each step"]
    heading = "To experts on other ranks and back: all-to-alls of a micro-batch, and what each rank sends"
    names = (kind.name for kind in fields(TokenFacts))
    return _sizes_table(heading, dict(zip(names, titles)), [rank.tokens for rank in facts.ranks])


def _memory_table(facts: Explanation) -> str:
    titles = [
        *("rank", "weights", "resident", "master", "optimizer", "gradients", "gradient buffers", "tied copies", "peak"),
        "stored activations",
    ]
    on_host = facts.spec.offload is not None
    if on_host:
        titles.insert(3, "loaded")
    rows = []
    for rank in facts.ranks:
        held = rank.memory
        before = [held.weights, held.resident_weights, *([held.loaded_weights] if on_host else []), held.master_weights]
        after = [held.gradients, held.gradient_buffers, held.tied_copies, held.peak]
        sizes = map(_size, (*before, held.optimizer_state, *after))
        rows.append([rank.pipeline_rank, *sizes, held.stored_activations])
    return "Memory, each rank\n" + table(titles, rows)


def _shared_table(facts: Explanation) -> str:
    if not facts.divides_experts:
        return ""
    titles = ["rank", "units", "shared by", "parameters", "gathers", "reduces", "send", "weights", "resident", "master"]
    titles += ["optimizer", "gradients", "gradient buffers", *(["on the host"] if facts.spec.offload else [])]
    rows = []
    for rank in facts.ranks:
        for units in rank.shared:
            held, divided = units.memory, units.expert_ranks
            kind = "dense" if divided == 1 else f"experts, 1/{divided} of all"
            sizes = [units.bytes_sent, held.weights, held.resident_weights, held.master_weights, held.optimizer_state]
            sizes += [held.gradients, held.gradient_buffers, *([held.host.peak] if held.host is not None else [])]
            counts = units.sharing_ranks, units.parameters, units.gathers, units.reduces
            rows.append([rank.pipeline_rank, kind, *counts, *map(_size, sizes)])
    return "Units by the ranks that share them, each kind of memory at its highest\n" + table(titles, rows, left={1})


def _host_table(facts: Explanation) -> str:
    titles = {kind.name: kind.name.replace("_", " ") for kind in fields(HostMemory)}
    if not facts.spec.stores_weights:
        del titles["gathered"]
    return _sizes_table("Memory on the host, each rank", titles, [rank.memory.host for rank in facts.ranks])


def _disk_table(facts: Explanation) -> str:
    titles = {
        "held": "held",
        "read": "read in a step",
        "written": "written in a step",
        "buffers": "buffers on the host",
    }
    return _sizes_table("On the disk, each rank", titles, [rank.disk for rank in facts.ranks])


def _live_table(facts: Explanation) -> str:
    titles = {"held": "held", "written": "written in a step"}
    return _sizes_table("Live states, each rank", titles, [rank.live for rank in facts.ranks])


def _activation_table(facts: Explanation) -> str:
    titles = {kind.name: kind.name.replace("_", " ") for kind in fields(ActivationMemory)}
    heading = "Memory of activations, each rank, each kind at its highest"
    return _sizes_table(heading, titles, [rank.memory.activations for rank in facts.ranks])


def _sizes_table(heading: str, titles: dict[str, str], ranks: Sequence[Any]) -> str:
    """Returns the bytes of every pipeline rank by kind; nothing if no rank has any.

    Args:
        titles: of the columns, by attribute.
        ranks: what has the attributes, by rank; None for a rank without.
    """
    rows = [
        [rank, *(getattr(held, kind) if kind in _COUNTS else _size(getattr(held, kind)) for kind in titles)]
        for rank, held in enumerate(ranks)
        if held is not None
    ]
    return f"{heading}\n" + table(["rank", *titles.values()], rows) if rows else ""


_COUNTS = ("layers", "all_to_alls")
"""Attributes that are no bytes."""


def _size(number: float | None) -> str:
    return "unknown" if number is None else with_unit(round(number), "B")


def _words(facts: Explanation) -> str:
    formula = "" if facts.bubble_formula is None else f"; (P-1)/(N*M) is {100 * facts.bubble_formula:.1f}%"
    sentences = [f"Pipeline bubble, simulated: {100 * facts.bubble:.1f}%{formula}."]
    if facts.data_ranks == 1:
        sentences.append("One data-parallel rank: nothing is gathered or reduced.")
    if facts.micro_batch_outer_gathers is not None:
        gathers = max(rank.traffic.gathers for rank in facts.ranks)
        sentences.append(
            "ZeRO-3 with micro-batches outermost would gather about "
            f"2*N*M = 2*{facts.most_chunks}*{facts.spec.micro_batches} = {facts.micro_batch_outer_gathers} times per "
            f"step and rank, not {gathers}."
        )
    sentences += _words_on_experts(facts)
    if constants := max(rank.constants for rank in facts.ranks):
        sentences.append(
            f"Quantised weights lie and travel as packed bytes. Each rank has the constants of its layers whole, up to "
            f"{_size(constants)} of its weights."
        )
    sentences += _words_on_activations(facts)
    update = max(facts.ranks, key=lambda rank: rank.update_bytes_sent)
    if update.update_collectives:
        sentences.append(
            f"The step of {facts.optimizer} itself sends at most {_size(update.update_bytes_sent)} in "
            f"{update.update_collectives} collective(s) on a rank, beside those above."
        )
    sentences += _words_on_bus(facts)
    if any(facts.balance_bytes) and facts.spec.pipeline_ranks > 1:
        there, back = map(_size, facts.balance_bytes)
        sentences.append(
            f"Every message of hidden states takes {there} more along for the loss that balances experts, and every "
            f"message of gradients {back}."
        )
    if facts.spec.overlaps_exchanges:
        program = [action.kind for actions in build_program(facts.spec) for action in actions]
        begun, computes = (sum(map(program.count, kinds)) for kinds in (STARTED, STARTED.values()))
        sentences.append(
            f"While tokens travel among ranks that divide experts, another micro-batch computes: {begun} of {computes} "
            "forwards and backwards of a pipeline begin beside the one before them."
        )
    if facts.spec.pipeline_ranks > 1:
        sentences.append("Layers of other pipeline ranks are taken as their specifications build them.")
    on_host = facts.spec.offload is not None
    homes = [rank.memory.host or rank.memory if on_host else rank.memory for rank in facts.ranks]
    if any(home.optimizer_state is None for home in homes):
        sentences.append("The optimizer's state is unknown and left out of the peak.")
    if facts.optimizer == LATER:
        sentences.append(
            "deepspeed.initialize got no optimizer: it is taken to come by engine._configure_optimizer, for all "
            "parameters that train now. An engine that only evaluates needs ds_lgamp.enabled false."
        )
    return "\n".join(sentences)


def _words_on_bus(facts: Explanation) -> list[str]:
    """Returns a sentence on the seconds of loads and stores; none without them."""
    if facts.ranks[0].bus_bytes_loaded is None:
        return []
    loaded = max(rank.bus_bytes_loaded or 0 for rank in facts.ranks)
    stored = max(rank.bus_bytes_stored or 0 for rank in facts.ranks)
    together = facts.spec.micro_batch_group >= facts.spec.micro_batches and not facts.spec.returns_outputs
    always = ", whatever the number of micro-batches" if together else ""
    return [
        f"Over a bus of {with_unit(_BUS, 'B/s')} in each direction (PCIe 4.0 x16), a step's loads take at least "
        f"{loaded / _BUS:.3g} s, its stores {stored / _BUS:.3g} s{always}."
    ]


def _words_on_activations(facts: Explanation) -> list[str]:
    sentences = []
    stored = "chunks with what autograd saves of them"
    if facts.settings.recompute in ("full", "auto"):
        stored = f"inputs of chunks, or {stored}" if facts.spec.kept else "inputs of chunks"
    passing = "layers" if all(rank.memory.update is not None for rank in facts.ranks) else "layers and the optimizer"
    if facts.activations_unknown is None:
        sentences.append(f"Stored activations are {stored}, a number. The peak includes their bytes.")
        if passing != "layers":
            sentences.append("The optimizer's temporary memory is unknown and left out of the peak.")
    else:
        sentences.append(
            f"Stored activations are {stored}, a number: their bytes are unknown, because {facts.activations_unknown}. "
            f"The peak leaves them out, and what {passing} take for the moment."
        )
    if facts.settings.compile is not False:
        sentences.append(
            f"Bytes of activations are those without {BLOCK}.compile: compiled code saves other tensors, and takes "
            "other memory for the moment."
        )
    return sentences


def _words_on_experts(facts: Explanation) -> list[str]:
    """Returns sentences on experts that ranks divide; none without them."""
    if not facts.divides_experts:
        return []
    sentences = ["Parameters of chunks are those of one rank, with its own experts."]
    if any(units.sharing_ranks == 1 for rank in facts.ranks for units in rank.shared) and facts.data_ranks > 1:
        sentences.append("Experts that no other rank has are neither gathered, nor reduced, nor partitioned.")
    if facts.activations_unknown is None:
        sentences.append("All-to-alls send the capacity of experts, whatever the routing; activations include it.")
    else:
        sentences.append(
            f"What all-to-alls send is known for each token only, because {facts.activations_unknown}. It is that of "
            "the balanced case, in which every expert gets as many tokens; other routing sends more or less."
        )
    sentences.append(
        "Links of a cluster file carry the bytes of experts as if all data-parallel ranks shared them, and no tokens."
    )
    return sentences
