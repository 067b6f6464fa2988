"""A pretend accelerator, `sim`: what a GPU would complain of or wait for, without a GPU.

Its tensors say `sim:0` or `sim:1`, hold the CPU's memory and are computed by the CPU's kernels, so that every number is
the CPU's to the bit. They refuse to meet tensors of another device, as CUDA's do; a transfer that a program on a real
one would wait for is counted by its source line; memory is counted and may run out.

    python -m tests.accelerator train.py --config configs/quickstart_gan.yaml --device sim ...

runs a script of this repository on it. In Python: `device.install()` once a process, then `with device.Mode(): ...`.
`torch.accelerator` then says that `sim` is what the machine has, for the rest of the process.

Two processes with a device each: `ranks/`.

Streams have an order that is checked (`streams.py`), though all work is done when a call returns. Not pretended:
storages.
"""
