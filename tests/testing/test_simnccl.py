"""The simulation keeps NCCL's rules, and names what breaks them. All cases run on the same two ranks, each in a group
of its own."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from testing import simnccl
from testing.ranks import run_on_ranks
from testing.simnccl.execution import Memory

POISONED = torch.iinfo(torch.int64).min
IS_NAN = "nan"
STUCK = []
"""Memory of works that never end."""


def sender() -> bool:
    return dist.get_rank() == 0


def start(group, tensor, tag=0):
    """Rank 0 sends ``tensor`` to rank 1, which receives into its own."""
    move, peer = (dist.isend, 1) if sender() else (dist.irecv, 0)
    return move(tensor, peer, group=group, tag=tag)


def complaint(call):
    with pytest.raises(simnccl.Fault) as raised:
        call()
    return str(raised.value)


def listed(tensor):
    return [IS_NAN if value != value else value for value in tensor.tolist()]


def outputs_before_and_after_the_wait(group, when):
    """Reads the outputs of an all-reduce, an all-gather in place, a reduce-scatter and a message of integers."""
    simnccl.deliver(when)
    rank = dist.get_rank()
    total, gathered = torch.full((2,), rank + 1.0), torch.full((4,), float(rank))
    parts, part, message = torch.arange(4.0), torch.empty(2), torch.arange(2) + 5 * rank
    outputs = total, gathered, part, message
    works = [
        dist.all_reduce(total, group=group, async_op=True),
        group._allgather_base(gathered, gathered[2 * rank : 2 * rank + 2]),
        group._reduce_scatter_base(part, parts, dist.ReduceScatterOptions()),
        start(group, message),
    ]
    # Time enough to execute what may be.
    time.sleep(0.1)
    before = [listed(output) for output in outputs]
    for work in works:
        work.wait()
    return before, [listed(output) for output in outputs]


def output_that_nobody_waits_for(group):
    """The wait for a later work does not stand in for it."""
    total, later = torch.ones(2), torch.ones(2)
    dist.all_reduce(total, group=group, async_op=True)
    dist.all_reduce(later, group=group)
    return listed(total), listed(later)


def output_that_was_seen_complete(group):
    total = torch.ones(1)
    work = dist.all_reduce(total, group=group, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    return listed(total)


def messages_under_swapped_tags(group):
    tensors = [torch.full((1,), 10.0 * number) if sender() else torch.empty(1) for number in (1, 2)]
    tags = (0, 1) if sender() else (1, 0)
    for work in [start(group, tensor, tag) for tensor, tag in zip(tensors, tags)]:
        work.wait()
    return [listed(tensor) for tensor in tensors]


def message_and_collective_in_two_orders(group):
    """Each rank waits for the first of its line, which is the second of the other's."""
    simnccl.host.patience = 0.5
    message, total = torch.ones(3), torch.ones(2)
    launches = [partial(start, group, message), partial(dist.all_reduce, total, group=group, async_op=True)]
    works = [launch() for launch in (launches if sender() else launches[::-1])]
    STUCK.extend([message, total])
    text = complaint(works[0].wait)
    simnccl.host.patience = 30.0
    return text


def two_communicators_in_two_orders(group):
    """The second work of a communicator waits for the first, and so does what stands behind it in a queue."""
    other = dist.new_group([0, 1])
    messages = [torch.ones(1) for _ in range(4)]
    order = [group, group, other, other] if sender() else [other, other, group, group]
    works = [start(each, message) for each, message in zip(order, messages)]
    STUCK.extend(messages)
    for work in works[::-1]:
        work.wait()
    return True


def two_communicators_in_two_orders_in_one_queue(group):
    simnccl.host.patience = 0.5
    simnccl.share_queues(1)
    text = complaint(partial(two_communicators_in_two_orders, group))
    simnccl.host.patience = 30.0
    simnccl.share_queues(None)
    return text


def communicators_in_one_order_in_one_queue(group):
    """A work starts while one before it in the queue is under way."""
    simnccl.share_queues(1)
    others = [group, *(dist.new_group([0, 1]) for _ in range(3))]
    totals = [torch.ones(1) for _ in others for _ in range(3)]
    works = [dist.all_reduce(total, group=other, async_op=True) for total, other in zip(totals, others * 3)]
    for work in reversed(works):
        work.wait()
    simnccl.share_queues(None)
    return {total.item() for total in totals}


def imagined_all_to_all(group):
    """The peer does not take part."""
    if not sender():
        return None
    with FakeTensorMode():
        received = torch.empty(2, dtype=torch.int32)
        dist.all_to_all_single(received, torch.ones(2, dtype=torch.int32), group=group)
    return type(received).__name__, [*received.shape]


def launch_before_the_peer_is_there(group):
    """The receive is launched only after both ranks met elsewhere."""
    message = torch.ones(1)
    work = start(group, message) if sender() else None
    completed = work is not None and work.is_completed()
    dist.barrier()
    (work or start(group, message)).wait()
    return completed


def late_work(group):
    """Completes only when its host waits for something else, here for the default group."""
    simnccl.deliver("late")
    total = torch.ones(1)
    work = dist.all_reduce(total, group=group, async_op=True)
    time.sleep(0.1)
    executed = work.executed
    simnccl.synchronize()
    return executed, work.executed


def harmed(group, rank, harm):
    """``rank`` harms the memory of a message before it travels."""
    simnccl.deliver("late")
    message = torch.ones(2, 3)
    work = start(group, message)
    if dist.get_rank() != rank:
        work.wait()
        return ""
    if harm == "written":
        message[0, 0] = 2
    elif harm == "freed":
        del message
    else:
        message.untyped_storage().resize_(0)
    return complaint(simnccl.synchronize)


def harmed_after_another_wait(group, harm):
    """A work is executed, but the rank has only waited for another one when it harms the memory."""
    total, other = torch.ones(2), torch.ones(2)
    work = dist.all_reduce(total, group=group, async_op=True)
    dist.all_reduce(other, group=group)
    if harm == "written":
        total[0] = 2
    else:
        total.untyped_storage().resize_(0)
    return complaint(work.wait)


def dropped_when_executed(group):
    """The sender waited for an answer, the receiver for a later message of the same communicator."""
    answers = dist.new_group([0, 1])
    look = Memory.complaint

    def look_slowly_at_inputs(memory):
        if "input" in memory.text:
            time.sleep(0.1)
        return look(memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "complaint", look_slowly_at_inputs)
        messages = [torch.ones(1), torch.ones(2)]
        works = [start(group, message) for message in messages]
        if sender():
            dist.recv(torch.empty(1), 1, group=answers)
        else:
            works[1].wait()
            dist.send(torch.ones(1), 0, group=answers)
        messages.clear()
        simnccl.synchronize()
    return True


def message_of_another_shape(group):
    message = torch.ones(3) if sender() else torch.ones(4)
    work = start(group, message)
    if sender():
        STUCK.append(message)
        return ""
    with pytest.raises(RuntimeError) as raised:
        work.wait()
    return str(raised.value)


def tensors_nccl_does_not_carry(group):
    return [
        complaint(partial(start, group, tensor)) for tensor in (torch.ones(2, dtype=torch.int16), torch.ones(3, 2).T)
    ]


CASES = [
    *(partial(outputs_before_and_after_the_wait, when=when) for when in ("early", "late", "random")),
    output_that_nobody_waits_for,
    output_that_was_seen_complete,
    messages_under_swapped_tags,
    two_communicators_in_two_orders,
    communicators_in_one_order_in_one_queue,
    imagined_all_to_all,
    launch_before_the_peer_is_there,
    late_work,
    *(partial(harmed, rank=rank, harm=harm) for rank in (0, 1) for harm in ("written", "freed", "emptied")),
    *(partial(harmed_after_another_wait, harm=harm) for harm in ("written", "emptied")),
    dropped_when_executed,
    tensors_nccl_does_not_carry,
    # These leave works behind that never end.
    message_and_collective_in_two_orders,
    message_of_another_shape,
    two_communicators_in_two_orders_in_one_queue,
]


def name_of(case):
    return (
        " ".join(map(str, [case.func.__name__, *case.keywords.values()]))
        if isinstance(case, partial)
        else case.__name__
    )


def run_cases():
    results = {}
    for case in CASES:
        simnccl.deliver("early")
        results[name_of(case)] = case(dist.new_group([0, 1]))
    return results


@pytest.fixture(scope="module")
def results():
    """What the cases returned, by name and rank."""
    of_ranks = run_on_ranks(2, run_cases, backend="simnccl")
    return {name: [results[name] for results in of_ranks] for name in of_ranks[0]}


@pytest.mark.parametrize("when", ["early", "late", "random"])
def test_outputs_are_poison_until_the_wait(results, when):
    for rank, (before, after) in enumerate(results[f"outputs_before_and_after_the_wait {when}"]):
        kept = [float(rank)] * 2
        gathered = [IS_NAN, IS_NAN, *kept] if rank else [*kept, IS_NAN, IS_NAN]
        assert before == [[IS_NAN] * 2, gathered, [IS_NAN] * 2, [POISONED] * 2 if rank else [0, 1]]
        assert after == [[3.0, 3.0], [0.0, 0.0, 1.0, 1.0], [[0.0, 2.0], [4.0, 6.0]][rank], [0, 1]]


def test_an_output_that_nobody_waits_for_stays_poison(results):
    assert results["output_that_nobody_waits_for"] == [([IS_NAN, IS_NAN], [2.0, 2.0])] * 2


def test_an_output_seen_complete_is_there(results):
    assert results["output_that_was_seen_complete"] == [[2.0]] * 2


def test_messages_come_in_order_whatever_their_tags(results):
    assert results["messages_under_swapped_tags"] == [[[10.0], [20.0]]] * 2


def test_messages_and_collectives_stand_in_one_line(results):
    first, second = results["message_and_collective_in_two_orders"]
    assert "no work was executed for 0.5 s" in first
    assert first.endswith(" of ranks [0, 1]: send to 1 of [3] float32 (at its turn), then all_reduce of [2] float32")
    assert second.endswith(": all_reduce of [2] float32 (at its turn), then receive from 0 of [3] float32")


def test_communicators_do_not_wait_for_each_other(results):
    assert results["two_communicators_in_two_orders"] == [True, True]


def test_communicators_wait_for_each_other_in_a_shared_hardware_queue(results):
    assert results["communicators_in_one_order_in_one_queue"] == [{2.0}, {2.0}]
    for text in results["two_communicators_in_two_orders_in_one_queue"]:
        assert "no work was executed for 0.5 s" in text


def test_an_operation_on_imagined_tensors_does_not_travel(results):
    assert results["imagined_all_to_all"] == [("FakeTensor", [2]), None]


def test_a_launch_does_not_wait(results):
    assert results["launch_before_the_peer_is_there"] == [False, False]


def test_a_late_work_is_executed_when_the_host_waits(results):
    assert results["late_work"] == [(False, True)] * 2


@pytest.mark.parametrize("harm", ["written", "freed", "emptied"])
@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (0, "send to 1 of [2, 3] float32 was under way when its input [2, 3] float32 was "),
        (1, "receive from 0 of [2, 3] float32 was under way when its output [2, 3] float32 was "),
    ],
)
def test_memory_that_a_work_uses_is_left_alone(results, rank, harm, text):
    assert results[f"harmed {rank} {harm}"][rank].endswith(text + ("written" if harm == "written" else "freed"))


@pytest.mark.parametrize("harm", ["written", "emptied"])
def test_memory_is_left_alone_until_the_wait_for_its_own_work(results, harm):
    for text in results[f"harmed_after_another_wait {harm}"]:
        assert "nobody had waited for all_reduce of [2] float32 when its input [2] float32 was " in text
        assert text.endswith("written" if harm == "written" else "freed")


def test_memory_may_be_dropped_when_the_work_is_executed(results):
    assert results["dropped_when_executed"] == [True, True]


def test_a_message_that_meets_the_wrong_receive_is_refused(results):
    assert results["message_of_another_shape"][1].endswith(
        "receive from 0 of [4] float32 failed: 3 elements of torch.float32 arrived"
    )


def test_what_nccl_does_not_carry_is_refused(results):
    for texts in results["tensors_nccl_does_not_carry"]:
        assert texts == [
            "NCCL carries no [2] int16",
            "NCCL carries contiguous tensors only, not [2, 3] float32 with strides (1, 2)",
        ]
