"""What a measuring process may meet, as functions that one can run; without torch, so that it starts quickly."""

import os
import time


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def prepare(job, custom):
    """Nothing."""


def fine(token, tile):
    return 0.5, float(tile.q)


def wrong(token, tile):
    return 7.0, 0.0


def not_a_number(token, tile):
    return float("inf"), 0.0


def illegal(token, tile):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def crash(token, tile):
    os.abort()


def hang(token, tile):
    time.sleep(60)


def exhausted(token, tile):
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")
