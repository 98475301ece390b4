"""A process group that keeps NCCL's rules on the CPU. Tests see with it, without a GPU, what gloo forgives.

``run_on_ranks(..., backend="simnccl")`` uses it. Real messages travel between real processes, over gloo underneath.

- Every process group is one communicator. It executes its works in launch order, one after another, in a thread of its
  own: point-to-point messages and collectives form one line, and tags do not exist. A send takes as long as the receive
  at its other end. Communicators do not wait for each other, unless :func:`share_queues` lets their streams share
  hardware queues, as those of a GPU do. Then a work starts once everything launched before it in its queue has started.
- An operation on imagined tensors is no launch.
- A launch does not wait. ``Work.wait()`` blocks the host, which on the CPU is the compute stream. On NCCL, too,
  everything launched after a wait runs after it.
- A work's outputs hold poison, NaN or an extreme integer, from its launch until somebody waits for it or sees it
  complete. A wait for a later work does not stand in for its own.
- A work's inputs and outputs must exist and stay as they are until it is executed. The simulation keeps nothing alive.
  What was freed or written meanwhile is a :class:`Fault` that names the work. The next call of the rank raises it.
- They must do so until the wait for the work, if somebody waits for it, also where it is executed long before: a wait
  for another work has not told that.
- A wait without progress raises :class:`Fault` and lists what stands in line.

NCCL is more lenient in three points. It opens a communicator of its own for two ranks that send to each other in a
larger group, unless groups are initialised eagerly. Its works keep their tensors alive for a while. Its small messages
may leave before they are received. Operations batched by ``batch_isend_irecv`` would make progress together on NCCL;
here they stand in line like others.

Sums equal gloo's to the bit. A reduce-scatter adds in the order of ranks.
"""

from testing.simnccl.execution import Delivery, Fault, deliver, host, share_queues, synchronize
from testing.simnccl.group import NAME, register

__all__ = ["NAME", "Delivery", "Fault", "deliver", "host", "register", "share_queues", "synchronize"]
