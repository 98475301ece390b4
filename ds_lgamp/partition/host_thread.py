"""A thread of the host that does one thing after another, beside the program: it updates units, or moves them."""

import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, current_thread

import torch

Work = Callable[[], Callable[[], None] | None]
"""What the thread calls. It may return what waiters call, such as the wait for a write to the disk: the thread goes on
with the next job meanwhile."""


class Job:
    """A function that the thread calls, or will call."""

    def __init__(self, function: Work, thread: Thread) -> None:
        self._function: Work | None = function
        self._thread = thread
        self._settle: Callable[[], None] | None = None
        self._over = Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Blocks until the job is over. Raises what it, or an earlier job of the thread, raised. The thread itself does
        not block: garbage collection can run there and destroy an engine, which waits for its jobs."""
        if current_thread() is self._thread:
            return
        self._over.wait()
        if self._error is not None:
            raise self._error
        if self._settle is not None:
            self._settle()

    def _run(self, failure: BaseException | None) -> BaseException | None:
        function, self._function = self._function, None
        assert function is not None, "a job runs once"
        if failure is None:
            try:
                self._settle = function()
            except BaseException as error:
                failure = error
        self._error = failure
        self._over.set()
        return failure


class HostThread:
    """Runs jobs in their order. It begins with the first job, and ends with the object.

    When a job has failed, all later ones fail with its error: they would work on half a step.

    Args:
        device: where the jobs' events and tensors are, beside the host.
        name: the thread's.
        threads: by how many threads torch computes a job; None for as many as everywhere.
    """

    def __init__(self, device: torch.device, name: str = "ds_lgamp updates", threads: int | None = None) -> None:
        self._device, self._name, self._threads = device, name, threads
        self._queue: SimpleQueue[Job | None] | None = None
        self._thread: Thread | None = None

    def start(self, function: Work) -> Job:
        """Lets the thread call ``function`` when it has done the jobs so far."""
        if self._queue is None or self._thread is None:
            self._queue = SimpleQueue()
            weakref.finalize(self, self._queue.put, None)
            self._thread = Thread(target=_serve, args=(self._queue, self._device), name=self._name, daemon=True)
            self._thread.start()
            if self._threads is not None:
                elsewhere = torch.get_num_threads()
                self.start(partial(_compute_with, self._threads)).wait()
                # torch would use the number for threads that begin later, too, which are not this one's to change.
                torch.set_num_threads(elsewhere)
        job = Job(function, self._thread)
        self._queue.put(job)
        return job


def _compute_with(threads: int) -> None:
    # A thread that has never asked would take torch's number at its first computation.
    torch.get_num_threads()
    torch.set_num_threads(threads)


def _serve(queue: "SimpleQueue[Job | None]", device: torch.device) -> None:
    use_device(device)
    failure = None
    while (job := queue.get()) is not None:
        failure = job._run(failure)
        # The thread must not keep what the job holds alive while it waits for the next one.
        del job


def use_device(device: torch.device) -> None:
    """Makes ``device`` the current one of the calling thread. A new thread begins with the node's first device, where
    every rank of the node would take some memory."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
