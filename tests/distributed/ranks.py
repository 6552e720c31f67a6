"""Processes that share a sequence: what each of them runs, and how a test starts them."""

from __future__ import annotations

import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = 600.0  # for a machine that does much else
AFTER_A_FAILURE = 20.0


def run_ranks(size: int, work: Callable[[DeviceMesh], Any]) -> list[Any]:
    """What `work(mesh)` returns in each of so many processes; AssertionError with their tracebacks where one raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    found = context.Queue()
    started = [context.Process(target=_run, args=(rank, size, port, work, found)) for rank in range(size)]
    for process in started:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in started:  # those that wait for a rank which raised send nothing more
            failed = any(text for text, _ in results.values())
            rank, result = found.get(timeout=AFTER_A_FAILURE if failed else TIMEOUT)
            results[rank] = result
    except queue.Empty:
        pass
    finally:
        for process in started:
            process.join(5)
            process.kill()
    failed = [text for _, text in sorted((r, text) for r, (text, _) in results.items()) if text]
    assert not failed, "\n".join(failed)
    assert len(results) == size, f"only ranks {sorted(results)} came to an end within {TIMEOUT} s"
    return [results[rank][1] for rank in range(size)]


def _run(rank: int, size: int, port: int, work: Callable[[DeviceMesh], Any], found: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        value, text = work(init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))), ""
    except BaseException:  # noqa: BLE001 - the test that waits shows it
        value, text = None, f"rank {rank}:\n{traceback.format_exc()}"
    found.put((rank, (text, value)))
    if not text:
        dist.barrier()
        dist.destroy_process_group()
