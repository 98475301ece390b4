"""A job that testing.chaos disturbs. Its argument is a JSON file with the fields of ``testing.chaos.jobs.Job``, a
folder, and the processes that hold the network of the ranks, if they have one. Every rank leaves a file with its
process in the folder; the rank that meets a fault leaves the file "fault"."""

import ctypes
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOR_EVER = 1000.0


def dies_of(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(FOR_EVER)


def kills_all(folder: Path) -> None:
    """Ends all ranks at once, as the end of a job's time or of its nodes does: none sees another one die."""
    ranks = [int(file.read_text()) for file in folder.glob("rank *")]
    others = [rank for rank in ranks if rank != os.getpid()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in others:
            os.kill(rank, number)
    dies_of(signal.SIGKILL)


def raises() -> None:
    raise ArithmeticError("chaos")


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(int(FOR_EVER))


def stops_for_a_while() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(2)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


def fills_the_disk() -> None:
    """From now on this rank cannot make a file longer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


class Trained:
    """The job of this rank.

    Args:
        told: the fields of the job.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.folder, self.rank = told, Path(told["folder"]), int(os.environ["RANK"])
        self.step, self.met = 0, False
        self.faults: dict[str, Callable[[], None]] = {
            "exception": raises,
            "exit": lambda: os._exit(random.choice((0, 3))),
            "segfault": lambda: ctypes.string_at(0),
            "SIGKILL": lambda: dies_of(signal.SIGKILL),
            "SIGTERM": lambda: dies_of(signal.SIGTERM),
            "all killed": lambda: kills_all(self.folder),
            "SIGSTOP": lambda: dies_of(signal.SIGSTOP),
            "interpreter held": holds_the_interpreter,
            "sleep": lambda: time.sleep(FOR_EVER),
            "dead link": self.waits_for_the_cut,
            "pause": stops_for_a_while,
            "slow rank": lambda: time.sleep(1.5),
            "full disk": fills_the_disk,
        }

    def waits_for_the_cut(self) -> None:
        while not (self.folder / "cut").exists():
            time.sleep(0.01)

    def meet(self, place: str) -> None:
        """Meets the fault, if this is its rank, step and place. A slow rank is slow from then on."""
        told = self.told
        slow = told["fault"] == "slow rank" and self.met
        if (self.rank, place) != (told["rank"], told["place"]) or self.step < told["step"] or (self.met and not slow):
            return
        self.met = True
        if told["fault"]:
            (self.folder / "fault").touch()
            # What damages checkpoints is up to the judge.
            self.faults.get(told["fault"], lambda: None)()

    @property
    def at_any_moment(self) -> bool:
        return self.told["place"] == "any moment" and self.told["fault"] != ""

    def run(self) -> None:
        # Imported late: it takes seconds, and whoever tries a fault needs none of it.
        import torch.distributed as dist

        from testing.chaos.doors import DOORS

        training = DOORS[self.told["door"]](self.told, self.meet)
        checkpoints, place = self.folder / "checkpoints", self.told["place"]
        saves = hasattr(training, "save")
        if saves:
            training.load(checkpoints)
        while training.step < self.told["steps"] or self.at_any_moment:
            self.step = training.step + 1
            self.meet("between steps")
            if self.at_any_moment and self.step == self.told["step"]:
                threading.Timer(self.told["delay"], self.meet, ["any moment"]).start()
            self.log(training.train())
            if place == "evaluation":
                self.meet(place)
                training.evaluate()
            if saves and training.step % self.told["save_every"] == 0:
                self.meet("save")
                training.save(checkpoints)
            if place == "load" and training.step == self.told["step"]:
                training.save(checkpoints)
                self.meet(place)
                training.load(checkpoints)
        dist.destroy_process_group()

    def log(self, loss: float) -> None:
        if self.rank == 0:
            with open(self.folder / "losses", "a") as losses:
                losses.write(json.dumps([self.step, loss]) + "\n")


def main() -> None:
    told = json.loads(Path(next(word for word in sys.argv[1:] if word.endswith(".json"))).read_text())
    trained = Trained(told)
    if told["holders"]:
        from testing.namespaces import Network

        Network(told["holders"]).enter(trained.rank)
    (trained.folder / f"rank {trained.rank}").write_text(str(os.getpid()))
    trained.run()


if __name__ == "__main__":
    main()
