"""Tells the host, one step late, whether a gradient overflowed, so that it never waits for the device."""

import torch


class LateFlag:
    """A flag that travels from the device to the host while the host goes on."""

    def __init__(self, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._arrived = torch.zeros((), device="cpu", pin_memory=not on_host)
        # A view of the same memory, because reading a tensor counts as waiting for a device.
        self._value = self._arrived.numpy()
        self._event = None if on_host else torch.get_device_module(device).Event()

    def exchange(self, flag: torch.Tensor) -> bool:
        """Returns the flag of the previous call, False at the first, and sends ``flag`` on its way to the host."""
        previous = self.pending
        self._arrived.copy_(flag, non_blocking=True)
        if self._event is not None:
            self._event.record()
        return previous

    @property
    def pending(self) -> bool:
        """What the next :meth:`exchange` returns. Reading it may wait for the device."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value)

    @pending.setter
    def pending(self, flag: bool) -> None:
        if self._event is not None:
            self._event.synchronize()
        self._arrived.fill_(flag)
