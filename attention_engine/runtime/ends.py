"""Lets autograd's threads finish before Python ends.

autograd runs the backward pass of a GPU's tensors on a thread of that GPU. That thread tells the caller that the
gradients are there, and then drops what it still holds of the pass. The last reference to a tensor that Python has seen
may be among it, and so may an error that was raised; to free either, the thread needs Python's lock. If Python is
ending by then, it makes the thread exit, which the destructor that runs does not allow: the process aborts with
"terminate called without an active exception". PyTorch 2.11 alone does so, more often the busier the cores are.

The thread does one thing after another. So a process that ran a backward pass on a GPU runs another as it ends, of one
number: when that is done, the thread has dropped all that came before.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes

import torch

_devices: set[torch.device] = set()


def settle_at_exit(device: torch.device) -> None:
    """When this process ends, autograd's thread of this GPU finishes first."""
    if device.type != "cuda":
        return
    if not _devices:
        atexit.register(settle)
    _devices.add(device)


def settle() -> None:
    """Runs a backward pass of one number on each GPU that ran one of ours."""
    for device in _devices:
        with contextlib.suppress(RuntimeError):  # a GPU that an error has lost: there is nothing to wait for
            _pass_through(device)


def _pass_through(device: torch.device) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, device=device, requires_grad=True)
        product, gradient = leaf * 1, torch.ones(1, device=device)
    for tensor in (leaf, product, gradient):  # never freed: the thread holds them a little longer, too
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
    product.backward(gradient)
