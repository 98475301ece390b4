"""When messages between pipeline ranks are sent, and when their receives are posted."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ds_lgamp.schedule.actions import RECEIVES, SENDS, Action, Kind, Program, receive_matching, receive_of, send_of
from ds_lgamp.schedule.rules.stops import Fault, Stop, pieces
from ds_lgamp.schedule.spec import RECEIVES_POSTED, ProgramSpec


def check_sends(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """A result that another rank consumes leaves directly after its compute."""
    for stop, following in zip(stops, stops[1:]):
        due = [send_of(stop.action)] if stop.action is not None and _leaves(spec, stop.action) else []
        if list(following.before[: len(due)]) != due:
            found = following.before[0] if following.before else following
            raise Fault(following.first, f"the result must be sent at once by {due[0]}, found {found}")
        for row, action in enumerate(following.before[len(due) :], following.first + len(due)):
            if action.kind in SENDS:
                raise Fault(row, f"{action} does not stand directly after the compute whose result it sends")


def _leaves(spec: ProgramSpec, action: Action) -> bool:
    """Whether another rank consumes the result of an action."""
    if action.kind is Kind.FORWARD:
        target = action.chunk + 1
    elif action.kind is Kind.BACKWARD:
        target = action.chunk - 1
    else:
        return False
    exists = spec.first_trained <= target if action.kind is Kind.BACKWARD else target < spec.chunks
    return exists and spec.placement[target] != spec.placement[action.chunk]


def _arrives(spec: ProgramSpec, compute: Action) -> bool:
    """Whether another rank makes the input of a compute."""
    source = compute.chunk - 1 if compute.kind is Kind.FORWARD else compute.chunk + 1
    return 0 <= source < spec.chunks and spec.placement[source] != spec.placement[compute.chunk]


def check_receives(spec: ProgramSpec, rank: int, stops: Sequence[Stop]) -> None:
    """Each message has one receive, posted before the compute that takes it, and none in a script's turn.

    With early receives, so many of a kind are posted at once (:func:`_most_posted`), each when there is room, in
    the order of their consumers, and no earlier than as many computes of its kind before, or twice as many of any kind.
    """
    for piece in pieces(stops):
        computes = [(stop, stop.action) for stop in piece if stop.action is not None and stop.computes]
        for stop in piece:
            if not stop.computes:
                stop.require([], "receives", *RECEIVES)
        due = {receive_of(action): place for place, (_, action) in enumerate(computes) if _arrives(spec, action)}
        taken = dict(zip(due.values(), due))
        """The receive that each compute takes, by its number."""
        places: dict[Action, int] = {}
        for place, (stop, action) in enumerate(computes):
            receives = stop.of(*RECEIVES) if stop.before else []
            for receive in receives:
                if receive in places or due.get(receive, -1) < place:
                    raise Fault(stop.row, f"{receive} is posted twice, or no later compute takes its message")
                places[receive] = place
            if place in taken and taken[place] not in places:
                raise Fault(stop.row, f"{action} needs {taken[place]} before it")
            if len(receives) > 1 and not spec.receives_on_arrival:
                in_order = sorted(receives, key=lambda each: (each.kind is Kind.RECV_BACKWARD, due[each]))
                stop.require(in_order, "receives", *RECEIVES)
        if not spec.receives_on_arrival:
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                most = _most_posted(spec, rank, kind is Kind.FORWARD)
                alike = [place for place, (_, action) in enumerate(computes) if action.kind is kind]
                for consumer, right in _early_places(alike, taken, most).items():
                    receive = taken[consumer]
                    if places[receive] != right:
                        fault = f"{receive} is posted here; its place is before {computes[right][1]}"
                        raise Fault(computes[places[receive]][0].row, fault)


def _early_places(alike: Sequence[int], taken: Mapping[int, Action], most: int) -> dict[int, int]:
    """Returns before which compute the receive of each one is posted.

    Args:
        alike: the numbers of the computes of one kind.
        taken: the receives, by the numbers of the computes that take them.
        most: how many may be posted at once.
    """
    # Before the first compute of the kind, others count as if they were of it.
    counted = [*range(alike[0] if alike else 0), *alike]
    number = {place: index for index, place in enumerate(counted)}
    consumers = [place for place in alike if place in taken]
    places = {}
    for index, consumer in enumerate(consumers):
        early = counted[max(0, number[consumer] - (most - 1))]
        room = consumers[index - most] + 1 if index >= most else 0
        places[consumer] = max(early, room, consumer - 2 * (most - 1))
    return places


def _most_posted(spec: ProgramSpec, rank: int, forward: bool) -> int:
    """Returns how many receives of one kind a rank may have posted at once.

    While a group larger than the ring passes, messages pile up where it comes around the ring to the next chunk, and
    where the turn begins: at the first chunk from which on no rank owns two. They do not if calls pass one by one.
    """
    placement, most = spec.placement, RECEIVES_POSTED
    group = spec.micro_batches if spec.forward_only else min(spec.micro_batch_group, spec.micro_batches)
    if spec.returns_outputs and forward:
        return most
    for chunk in (chunk for chunk, owner in enumerate(placement) if owner == rank):
        source = chunk - 1 if forward else chunk + 1
        if not 0 <= source < spec.chunks or placement[source] == rank:
            continue
        upper = max(chunk, source)
        begins_turn = len(set(placement[upper:])) == spec.chunks - upper and placement[upper - 1] in placement[upper:]
        comes_around = placement[source] > rank if forward else placement[source] < rank
        if comes_around or (begins_turn and not spec.forward_only):
            most = max(most, group - spec.pipeline_ranks + 2)
    return most


def check_arrivals(stops: Sequence[Stop], starts: Sequence[float], ends: Mapping[tuple[Kind, int, int], float]) -> None:
    """A receive that is posted on arrival stands directly before the first compute that begins once its message has
    been sent; several, in the order in which they were sent, activations first.

    Args:
        stops: of the rank.
        starts: when each of its computes starts on the clock.
        ends: when each compute of all ranks ends, by kind, chunk and micro-batch.
    """
    consumers = {receive_of(stop.action): stop.row for stop in stops if stop.action is not None and stop.computes}

    def sent(receive: Action) -> tuple[float, bool, int]:
        forward = receive.kind is Kind.RECV_FORWARD
        kind, source = (Kind.FORWARD, receive.chunk - 1) if forward else (Kind.BACKWARD, receive.chunk + 1)
        return ends[kind, source, receive.micro_batch], not forward, consumers[receive]

    for place, stop in enumerate(stop for stop in stops if stop.computes):
        receives = stop.of(*RECEIVES)
        stop.require(sorted(receives, key=sent), "receives", *RECEIVES)
        for receive in receives:
            time = sent(receive)[0]
            if starts[place] < time or (place > 0 and starts[place - 1] >= time):
                raise Fault(stop.row, f"{receive} is not posted when its message arrives")


def check_channels(spec: ProgramSpec, program: Program) -> None:
    """Sends and posts of each channel (source, destination, kind) come in the same order. A channel delivers messages
    in order."""
    sends: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = defaultdict(list)
    posts: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for rank, actions in enumerate(program):
        for row, action in enumerate(actions):
            kind = action.kind
            if kind in SENDS:
                target = receive_matching(action).chunk
                channel = rank, spec.placement[target], kind is Kind.SEND_FORWARD
                sends[channel].append((target, action.micro_batch, row))
            elif kind in RECEIVES:
                forward = kind is Kind.RECV_FORWARD
                maker = action.chunk - 1 if forward else action.chunk + 1
                posts[spec.placement[maker], rank, forward].append((action.chunk, action.micro_batch, row))
    for channel in sends.keys() | posts.keys():
        source, destination, _ = channel
        sent, posted = sends[channel], posts[channel]
        for send, post in zip(sent, posted):
            if send[:2] != post[:2]:
                receive, sending = program[destination][post[2]], program[source][send[2]]
                raise Fault(post[2], f"{receive} is posted where rank {source} sends {sending}", destination)
        if len(sent) != len(posted):
            rank, rows = (source, sent) if len(sent) > len(posted) else (destination, posted)
            row = rows[min(len(sent), len(posted))][2]
            raise Fault(row, f"{program[rank][row]} has no counterpart on the other rank", rank)
