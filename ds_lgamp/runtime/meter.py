"""Measures the memory that a micro-batch takes on each chunk while steps run, for recompute "auto", and refuses layers
that do not repeat the part of themselves that they recompute."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from ds_lgamp.cost.activations import ChunkBytes
from ds_lgamp.runtime.chunk import Chunk, named_modules_of, tensors_in
from ds_lgamp.runtime.measure import PeakMemory, storage_of
from ds_lgamp.runtime.messages import message_bytes
from ds_lgamp.runtime.recompute import RandomSource, SavedTensors, read_states
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.spec import ActivationType


class NotedTensors(SavedTensors):
    """Saved tensors of a forward that is measured: notes what memory they had."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[int, weakref.ref] = {}

    def _drop(self, tensor: torch.Tensor) -> Any:
        storage = storage_of(tensor)
        self._noted[storage._cdata] = weakref.ref(storage)
        return super()._drop(tensor)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether autograd would keep the memory of ``tensor``, which is alive."""
        noted = self._noted.get(storage_of(tensor)._cdata)
        return noted is not None and noted() is not None


class RepeatedParts:
    """Refuses layers of a chunk that compute something else if they recompute a part of themselves than if the chunk is
    computed again as a whole.

    Args:
        sources: the generators from which layers may draw.
    """

    def __init__(self, chunk: Chunk, sources: Sequence[RandomSource]) -> None:
        self._chunk, self._sources = chunk, sources
        self._reached: set[int] = set()
        """The ids of the parameters that got gradients in the last backward of a whole that was measured."""

    @contextmanager
    def whole(self, block: AbstractContextManager[Any]) -> Iterator[None]:
        """Notes which parameters get gradients in the ``block``, the backward of a chunk computed again as a whole."""
        with block, self._noting() as self._reached:
            yield

    @contextmanager
    def repeated(self, block: AbstractContextManager[Any], reaches: set[int] | None) -> Iterator[None]:
        """Lets layers recompute a part of themselves in the ``block``, a backward. Raises RuntimeError if the part
        changes state, which it does once more then, or draws anew, or loses gradients.

        Args:
            reaches: the ids of the parameters in the graph of the whole; None looks at nothing but the state.
        """
        closely, chunk = reaches is not None, self._chunk
        changed, states = chunk.state.watch(closely), read_states(self._sources) if closely else []
        with chunk.selectively(block), self._noting() if closely else nullcontext(set[int]()) as reached:
            yield
        drawn = [each.name for each, before in zip(self._sources, states) if not each.same(before, each.read())]
        name, lost = changed(), (reaches or set()) & self._reached - reached
        if name is not None:
            raise RuntimeError(
                f"{name} changed when a layer recomputed a part of itself; let it leave that alone in this part, or "
                "set ds_lgamp.recompute to 'full' or 'none'"
            )
        if drawn:
            raise RuntimeError(
                f"other random numbers were drawn ({drawn[0]}) when a layer recomputed a part of itself; let it "
                "restore their state there, or set ds_lgamp.recompute to 'full' or 'none'"
            )
        if lost:
            name = next(name for name, parameter in self._parameters() if id(parameter) in lost)
            raise RuntimeError(
                f"{name} got no gradient when a layer recomputed a part of itself; let it use torch.utils.checkpoint "
                "with use_reentrant=False, or set ds_lgamp.recompute to 'full' or 'none'"
            )

    @contextmanager
    def _noting(self) -> Iterator[set[int]]:
        """Yields the ids of the parameters that get gradients inside the block."""
        reached: set[int] = set()
        trained = {id(parameter): parameter for _, parameter in self._parameters() if parameter.requires_grad}
        handles = [each.register_hook(lambda _, key=key: reached.add(key)) for key, each in trained.items()]
        try:
            yield reached
        finally:
            for handle in handles:
                handle.remove()

    def _parameters(self) -> Iterator[tuple[str, Parameter]]:
        for path, module in named_modules_of(self._chunk.layers, self._chunk.first_layer):
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}", parameter


class ChunkMeter:
    """Measures the bytes that a micro-batch takes on each chunk of a rank while steps run. Only forwards with a larger
    input than all before are measured, and they are recomputed, whatever the program says.

    One run tells both ways: the repeated forward saves what a kept one would, up to the last saved tensor, after which
    it stops. So a kept forward counts as the larger of its peak and all that is kept, beside the result.

    Where layers can recompute a part of themselves, the next forward with an input of that size tells what this takes.
    Its backward computes the chunk again with a graph of its own, as layers would keep it.

    Args:
        narrow: the type in which hidden states travel, if they travel rounded.
        parts: by chunk whose layers can recompute a part of themselves, what refuses the part.
    """

    def __init__(self, narrow: ActivationType | None = None, parts: Mapping[int, RepeatedParts] | None = None) -> None:
        self._narrow, self._parts = narrow, parts or {}
        self.received: dict[int, int] = {}
        """Bytes of the largest input of each chunk as it travels, if hidden states travel rounded."""
        self.chunks: dict[int, ChunkBytes] = {}
        """The most of each kind on each chunk."""
        self.selective: dict[int, ChunkBytes] = {}
        """Of chunks whose layers recompute a part of themselves, for the largest input; none before it comes again."""
        self.inputs: dict[int, int] = {}
        """Bytes of the largest input of each chunk."""
        self.has_grown = False
        """Whether anything was measured since somebody has last set this."""
        self._shapes: dict[int, list[torch.Size]] = {}
        """By chunk: the largest sizes that each tensor of its inputs has had, for each number of dimensions."""
        self._readings: dict[tuple[int, int], _Reading] = {}

    def measure_again(self) -> None:
        """Measures the next forward of every chunk, because backwards go further down than before."""
        self._shapes.clear()
        self.selective.clear()

    def is_outgrown(self, chunk: int, inputs: Any) -> bool:
        """Whether an input has more bytes, or is longer in any dimension, than all before."""
        tensors, before = tensors_in(inputs), self._shapes.get(chunk, [])
        if sum(each.nbytes for each in tensors) > self.inputs.get(chunk, -1) or len(tensors) != len(before):
            return True
        return any(_largest(tensor.shape, most) != most for tensor, most in zip(tensors, before))

    def tells_selective(self, chunk: int, inputs: Any) -> bool:
        """Whether a forward with these inputs, which are as large as the largest ones, tells what layers take that
        recompute a part of themselves."""
        if chunk not in self._parts or chunk in self.selective:
            return False
        return [tensor.shape for tensor in tensors_in(inputs)] == self._shapes.get(chunk)

    def marked(self, action: Action) -> Action:
        """Returns the backward of a forward that was recomputed because of this meter."""
        reading = self._readings.get((action.chunk, action.micro_batch))
        return action._replace(recomputed=True, selective=reading is not None and reading.selective)

    def outgrow(self, chunk: int, inputs: Any) -> int:
        """Notes an input that has outgrown all before. Returns its bytes."""
        tensors, before = tensors_in(inputs), self._shapes.get(chunk, [])
        size, known = sum(each.nbytes for each in tensors), len(before) == len(tensors)
        self.selective.pop(chunk, None)
        self.inputs[chunk] = max(size, self.inputs.get(chunk, 0))
        pairs = zip(tensors, before if known else (tensor.shape for tensor in tensors))
        self._shapes[chunk] = [_largest(tensor.shape, most) for tensor, most in pairs]
        return size

    def begin(self, action: Action, inputs: Any) -> AbstractContextManager[Any]:
        """Returns a context for the forward of ``action``, which has outgrown all before, or is ``selective``."""
        chunk = action.chunk
        reading = self._readings[chunk, action.micro_batch] = _Reading(self.outgrow(chunk, inputs), action.selective)
        if self._narrow is not None and chunk > 0:
            self.received[chunk] = max(message_bytes(inputs, self._narrow), self.received.get(chunk, 0))
        return reading.block()

    def note_graph(self, action: Action, reaches: set[int]) -> None:
        """Notes the ids of the parameters in the graph of a ``selective`` forward, which has computed the whole."""
        self._readings[action.chunk, action.micro_batch].reaches = reaches

    def checked(self, action: Action, block: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """Returns the ``block`` of a backward. If it is ``selective``, layers recompute a part of themselves in it, and
        RuntimeError is raised if that is not what they did at first."""
        parts, reading = self._parts.get(action.chunk), self._readings.get(action[1:3])
        if parts is not None and action.selective:
            return parts.repeated(block, None if reading is None else reading.reaches)
        return block if parts is None or reading is None else parts.whole(block)

    def end_forward(self, action: Action, result: Any, saved: SavedTensors | None) -> None:
        """Reads the end of a forward.

        Args:
            result: what another chunk gets; None of the last chunk.
            saved: of a chunk with a backward.
        """
        reading = self._readings[action.chunk, action.micro_batch]
        members = tensors_in(result)
        reading.result = sum(each.nbytes for each in members)
        if self._narrow is not None and saved is not None and members:
            reading.sent = message_bytes(result, self._narrow)
        reading.keeps_result = isinstance(saved, NotedTensors) and any(map(saved.has, members))
        if saved is None:
            del self._readings[action.chunk, action.micro_batch]
            self.enter(action.chunk, ChunkBytes(reading.result, reading.blocks[0].peak, 0))

    def again(self, action: Action) -> AbstractContextManager[Any]:
        """Returns a context for the forward that the backward of ``action`` repeats."""
        reading = self._readings.get((action.chunk, action.micro_batch))
        if reading is None:
            return nullcontext()
        reading.memory = PeakMemory(only_new=True)
        return reading.block()

    def end_again(self, action: Action, result: Any) -> None:
        """Reads the end of a repeated forward with a graph of its own.

        Args:
            result: None of the last chunk.
        """
        reading = self._readings.get((action.chunk, action.micro_batch))
        if reading is not None:
            reading.members = [weakref.ref(storage_of(member)) for member in tensors_in(result)]

    @contextmanager
    def backward(self, action: Action) -> Iterator[None]:
        """Measures the backward of ``action`` after what it repeats."""
        reading = self._readings.pop((action.chunk, action.micro_batch), None)
        if reading is None:
            yield
            return
        if reading.selective:
            reading.keeps_result = any(member() is not None for member in reading.members)
        with reading.block():
            yield
        if reading.selective:
            self._enter(self.selective, action.chunk, reading.kept())
        else:
            self.enter(action.chunk, reading.chunk_bytes())

    def enter(self, chunk: int, taken: ChunkBytes) -> None:
        """Enters what a micro-batch has taken on a chunk."""
        self._enter(self.chunks, chunk, taken)

    def _enter(self, way: dict[int, ChunkBytes], chunk: int, taken: ChunkBytes) -> None:
        known = way.get(chunk)
        way[chunk] = taken if known is None else taken.most(known)
        self.has_grown = True


def _largest(shape: torch.Size, most: torch.Size) -> torch.Size:
    """Returns the larger size in each dimension; ``shape`` if it has other dimensions."""
    return torch.Size(map(max, shape, most)) if len(shape) == len(most) else shape


class _Block(NamedTuple):
    """What a block of operations took."""

    peak: int
    after: int
    """Bytes alive at its end."""


class _Reading:
    """The reading of one chunk and micro-batch.

    Args:
        size: bytes of the input.
        selective: whether layers recompute a part of themselves.
    """

    def __init__(self, size: int, selective: bool) -> None:
        self.size, self.selective, self.result, self.keeps_result = size, selective, 0, False
        self.members: list[weakref.ref] = []
        """The memory of the repeated forward's result."""
        self.reaches: set[int] | None = None
        """The ids of the parameters in the graph of the forward; None if nobody asks."""
        self.sent: int | None = None
        self.memory = PeakMemory(only_new=True)
        self.blocks: list[_Block] = []
        """Forward, repeated forward if there is one, backward."""

    @contextmanager
    def block(self) -> Iterator[None]:
        self.memory.peak = self.memory.live()
        with self.memory:
            yield
        self.blocks.append(_Block(self.memory.peak, self.memory.live()))

    def chunk_bytes(self) -> ChunkBytes:
        """Returns the bytes of a chunk that is recomputed, and those if it were kept."""
        forward, again, backward = self.blocks
        most = max(again.peak, backward.peak)
        return ChunkBytes(self.result, forward.peak - self.size, most - self.size, sent=self.sent, kept=self.kept())

    def kept(self) -> ChunkBytes:
        """Returns the bytes of a micro-batch of which autograd keeps what the repeated forward has saved."""
        _, again, backward = self.blocks
        peak = again.peak - self.size
        return ChunkBytes(
            self.result,
            peak if self.selective else max(peak, again.after + self.result),
            backward.peak - again.after,
            saved=again.after - (self.result if self.keeps_result else 0),
            keeps_result=self.keeps_result,
        )
