"""Processes that share a sequence: what each of them runs, and how a test starts them."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = 600.0  # for a machine that does much else
AFTER_A_FAILURE = 20.0


class _Pool:
    """Processes that run one work after another: each is started once, which takes longer than most of what it runs."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, Connection]] = []

    def grow(self, size: int) -> None:
        """As many as that; new ones where one has ended."""
        if not all(process.is_alive() for process, _ in self.started):
            self.end()
        context = mp.get_context("spawn")
        while len(self.started) < size:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.started.append((process, mine))

    def end(self) -> None:
        """Kills them all."""
        for process, pipe in self.started:
            process.kill()
            pipe.close()
        self.started = []


POOL = _Pool()


def run_ranks(size: int, work: Callable[[DeviceMesh], Any]) -> list[Any]:
    """What `work(mesh)` returns in each of so many processes; AssertionError with their tracebacks where one raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    POOL.grow(size)
    ranks = {pipe: rank for rank, (_, pipe) in enumerate(POOL.started[:size])}
    for pipe, rank in ranks.items():
        pipe.send((rank, size, port, work))
    results: dict[int, Any] = {}
    while len(results) < size:  # those that wait for a rank which raised send nothing more
        failed = any(text for text, _ in results.values())
        waiting = [pipe for pipe, rank in ranks.items() if rank not in results]
        ready = wait(waiting, AFTER_A_FAILURE if failed else TIMEOUT)
        if not ready:
            break
        for pipe in ready:
            try:
                results[ranks[pipe]] = pipe.recv()
            except EOFError:
                results[ranks[pipe]] = f"rank {ranks[pipe]} ended", None
    failures = [text for _, (text, _) in sorted(results.items()) if text]
    if failures or len(results) < size:
        POOL.end()
    assert not failures, "\n".join(failures)
    assert len(results) == size, f"only ranks {sorted(results)} came to an end within {TIMEOUT} s"
    return [results[rank][1] for rank in range(size)]


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            given = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(*given))


def _run(rank: int, size: int, port: int, work: Callable[[DeviceMesh], Any]) -> tuple[str, Any]:
    """What was raised, as text, and what was returned."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        value = work(init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)))
    except BaseException:  # noqa: BLE001 - the test that waits shows it
        return f"rank {rank}:\n{traceback.format_exc()}", None
    if dist.is_initialized():  # a script ends its group itself
        dist.barrier()
        dist.destroy_process_group()
    return "", value
