"""What becomes of gradients: reductions, sums between nodes, stores, updates and STEP."""

from collections import Counter
from collections.abc import Sequence

from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.rules.order import Fault, Stop
from ds_lgamp.schedule.spec import ProgramSpec

_OF_GRADIENTS = frozenset(
    {
        *(Kind.REDUCE, Kind.WAIT_REDUCE, Kind.COMBINE, Kind.WAIT_COMBINE, Kind.STORE, Kind.WAIT_STORE, Kind.UPDATE),
        Kind.WEIGHTS_BACKWARD,
    }
)


def check_gradients(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """- Backwards of the chunks that the spec splits have second parts, which run in the order of their backwards. At
      most so many wait as the spec allows, and none of another group at stages 2 and 3.
    - A chunk is reduced directly after its last backward, and the SEND or the second part of that; at stages 2 and 3
      also after the last one of each group.
    - Reductions end in the order they began, those of a single data-parallel rank that offloads as soon as they began.
      Another rank waits for the oldest only if it must: before a backward that adds
      to the same chunk's gradient, or that would hold more full gradients than ``resident_chunks`` (stages 1 to 3);
      before STEP; and, if something follows a reduction on its way, when one compute has run beside it.
    - Between nodes a sum follows the wait for each reduction inside them, at most ``resident_chunks`` at once.
    - A chunk's update or store, if it has one, comes directly after the end of its last reduction. A store waits
      for the one before, whose update may then begin.
    - STEP has all gradients, and no store is under way. The updates on the host that it decides on follow it.
    """
    rule = _Gradients(spec)
    for stop in stops:
        for row, action in enumerate(stop.before, stop.first):
            if action.kind in rule.kinds:
                rule.follow(row, action, stop)
        rule.arrive(stop)


class _Gradients:
    """Follows a program action by action."""

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec
        postponed = spec.offload is None and spec.updates == "next_step"
        self.kinds = _OF_GRADIENTS - {Kind.UPDATE} if postponed else _OF_GRADIENTS
        """An update that a step left to the next one is a matter of weights."""
        self.goes_on = spec.hierarchy is not None or spec.offload is not None
        """Whether something follows a reduction on its way."""
        self.backwards: Counter[int] = Counter()
        """Complete ones, by chunk."""
        self.second_parts: list[Action] = []
        """Backwards that wait for their second part, the oldest first."""
        self.accumulating: set[int] = set()
        """Chunks with a gradient that is not final."""
        self.reducing: list[int] = []
        """Oldest first."""
        self.covered = 0
        """How many of them, the oldest, a compute has run beside."""
        self.combining: list[int] = []
        """Oldest first."""
        self.storing: int | None = None
        self.stored: set[int] = set()
        self.visited: dict[int, None] = {}
        """Chunks in the order of their first compute."""
        self.next: list[Action] = []
        """What must follow directly."""

    def follow(self, row: int, action: Action, stop: Stop) -> None:
        """Checks an action before ``stop``."""
        kind, chunk, *_ = action
        full = len(self.combining) == self.spec.resident_chunks
        if self.next and not (full and self.next[0].kind is Kind.COMBINE and kind is Kind.WAIT_COMBINE):
            if action != self.next[0]:
                raise Fault(row, f"found {action} where {self.next[0]} belongs")
            if full and kind is Kind.COMBINE:
                raise Fault(row, f"{action} begins while {len(self.combining)} sums between nodes are under way")
            del self.next[0]
        elif not self.next and not self._may_stand(action, stop):
            raise Fault(row, f"{action} does not belong here: {stop} does not need it")
        if kind is Kind.WEIGHTS_BACKWARD:
            del self.second_parts[0]
            self._complete(action)
        elif kind is Kind.REDUCE:
            self.accumulating.discard(chunk)
            self.reducing.append(chunk)
            if self.spec.offload is not None and self.spec.offload.alone:
                self.next = [Action(Kind.WAIT_REDUCE, chunk)]
        elif kind is Kind.WAIT_REDUCE:
            self._take_oldest(self.reducing, row, action)
            self.covered -= 1
            if self.spec.hierarchy is not None:
                self.next.append(Action(Kind.COMBINE, chunk))
            else:
                self._end(chunk)
        elif kind is Kind.COMBINE:
            self.combining.append(chunk)
        elif kind is Kind.WAIT_COMBINE:
            self._take_oldest(self.combining, row, action)
            self._end(chunk)
        elif kind is Kind.STORE:
            self.storing = chunk
            self.stored.add(chunk)
        elif kind is Kind.WAIT_STORE:
            self.storing = None

    def _take_oldest(self, under_way: list[int], row: int, wait: Action) -> None:
        if wait.chunk != under_way[0]:
            raise Fault(row, f"{wait} comes before the wait for chunk {under_way[0]}, which began earlier")
        del under_way[0]

    def _end(self, chunk: int) -> None:
        """Notes what must follow the end of a reduction. Only the last one of a chunk ends with all its backwards."""
        offload = self.spec.offload
        if self.backwards[chunk] < self.spec.micro_batches:
            return
        if offload is None and self.spec.updates == "reduction":
            self.next.insert(0, Action(Kind.UPDATE, chunk))
        elif offload is not None and chunk not in offload.on_device:
            self.next = [*self._end_of_store(), Action(Kind.STORE, chunk)]

    def _end_of_store(self) -> list[Action]:
        if self.storing is None:
            return []
        update = [Action(Kind.UPDATE, self.storing)] if self.spec.updates == "reduction" else []
        return [Action(Kind.WAIT_STORE, self.storing), *update]

    def _may_stand(self, action: Action, stop: Stop) -> bool:
        """Whether ``stop`` needs an action that nothing before it demands."""
        steps = stop.action is not None and stop.action.kind is Kind.STEP
        if action.kind is Kind.WEIGHTS_BACKWARD:
            return bool(self.second_parts) and self.second_parts[0][1:3] == action[1:3]
        if action.kind is Kind.WAIT_REDUCE:
            return self._must_wait(stop)
        if action.kind is Kind.WAIT_COMBINE:
            return not self._must_wait(stop) and self._must_combine(stop)
        if action.kind is Kind.WAIT_STORE and steps and not self.reducing and action.chunk == self.storing:
            self.next = self._end_of_store()[1:]
            return True
        return False

    def _must_wait(self, stop: Stop) -> bool:
        """Whether the oldest reduction must end before ``stop``."""
        if not self.reducing or stop.action is None or stop.action.kind is Kind.RETURN:
            return False
        kind, chunk, *_ = stop.action
        if kind is Kind.STEP or (self.goes_on and self.covered > 0):
            return True
        if kind is not Kind.BACKWARD or chunk in self.accumulating:
            return False
        held = len(self.accumulating) + len(self.reducing)
        return chunk in self.reducing or (self.spec.zero_stage >= 1 and held >= self.spec.resident_chunks)

    def _must_combine(self, stop: Stop) -> bool:
        """Whether the oldest sum between nodes must end before ``stop``."""
        if not self.combining or stop.action is None:
            return False
        kind, chunk, *_ = stop.action
        return kind is Kind.STEP or (kind is Kind.BACKWARD and chunk in self.combining)

    def _check_second_parts(self, stop: Stop, action: Action) -> None:
        """Checks which backwards wait for their second part when ``action``, that of ``stop``, begins."""
        waiting, spec = self.second_parts, self.spec
        if not waiting:
            return
        group = spec.micro_batch_group
        chunks = {part.chunk for part in waiting}
        is_new = action.kind is Kind.BACKWARD and action.chunk not in chunks
        if not stop.computes:
            fault = "ends what"
        elif len(waiting) > spec.split_backward:
            fault = f"lets more than {spec.split_backward} backwards wait:"
        elif spec.zero_stage >= 2 and waiting[0].micro_batch // group != action.micro_batch // group:
            fault = "begins a group before"
        elif is_new and spec.zero_stage >= 1 and len(chunks) >= spec.resident_chunks:
            fault = f"lets gradients of more than {spec.resident_chunks} chunks wait:"
        else:
            return
        raise Fault(stop.row, f"{stop} {fault} the second part of {waiting[0]} has not completed")

    def _complete(self, action: Action) -> None:
        """Counts a backward that ``action`` completes, and notes what must follow."""
        self.backwards[action.chunk] += 1
        done = action.micro_batch + 1
        ends_group = self.spec.zero_stage >= 2 and done % self.spec.micro_batch_group == 0
        if ends_group or done == self.spec.micro_batches:
            self.next = [Action(Kind.REDUCE, action.chunk)]

    def arrive(self, stop: Stop) -> None:
        """Checks that everything has happened before ``stop``, and notes what it changes."""
        if self.next:
            raise Fault(stop.row, f"found {stop} where {self.next[0]} belongs")
        if stop.action is None:
            return
        if self._must_wait(stop):
            raise Fault(stop.row, f"{stop} must wait for the reduction of chunk {self.reducing[0]} first")
        if self._must_combine(stop):
            raise Fault(stop.row, f"{stop} must wait for the sum of chunk {self.combining[0]} between nodes first")
        self._check_second_parts(stop, stop.action)
        kind, chunk, *_ = stop.action
        if stop.computes:
            self.covered = len(self.reducing)
            self.visited.setdefault(chunk)
        if kind is Kind.BACKWARD:
            self.accumulating.add(chunk)
            if chunk in self.spec.split_chunks:
                self.second_parts.append(stop.action)
            else:
                self._complete(stop.action)
        elif kind is Kind.STEP:
            if self.storing is not None:
                raise Fault(stop.row, f"{stop} needs the gradient of chunk {self.storing} on the host first")
            if self.spec.updates == "next_step":
                self.next = [Action(Kind.UPDATE, chunk) for chunk in self.visited if chunk in self.stored]
