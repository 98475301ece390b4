"""A GPU that is imagined: what lies on it is fake, so that a training step runs on the CPU as it would run on a GPU.

The device is ``gpu:0``. torch's FakeTensorMode gives its tensors shapes, types and autograd, but no values. Tensors of
the host are real, and so is what hosts send to each other. Collectives of the device move nothing. A step in which the
host would wait for the device raises :class:`testing.imagined_gpu.device.HostWaits`, and an operation that mixes both
raises as on a GPU.

Start the ranks with ``run_on_ranks(ranks, function, before_init=prepare_rank, backend=BACKEND)`` from
:mod:`testing.imagined_gpu.accelerator`, and let ``function`` build and train inside
:func:`testing.imagined_gpu.border.imagine`.

Why the device is not called "cuda": a torch built for CPUs has no streams for CUDA devices, and its autograd asks for
one in every backward pass. torch's PrivateUse1 device can be described in Python.
"""
