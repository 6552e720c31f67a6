"""What a layer's attention takes on many GPUs, by method: arithmetic, from rates that were measured on H100s.

Work is shared evenly. A launch ends with half of its SMs idle for the time of its longest item, so that a rank's two
launches lose what one GPU's one doesn't. Forward and within a node, what a first launch or group of heads needs is sent
before it, and the rest behind it; a ring's keys go behind kernels both ways. `method="auto"` follows these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

RATES = (697e12, 640e12)  # products a second and GPU, forward and backward: 16-bit, head dim 128
WITHIN, BETWEEN = 280e9, 45e9  # bytes a second and GPU: NVLink, by NCCL's sends; a NIC of 400 Gb/s
MEMORY = 3e12  # bytes a second
NODE = 8  # GPUs
BLOCKS, QUERIES = 132, 128  # of a GPU; of a block
PASSES = 4  # over what a collective brings: it is put in order, and padded
PACKED = 2  # the same where heads are exchanged: they are packed, and joined
WORTH = 128 << 20  # bytes of queries, keys and values for each rank: fewer are sent at once, before kernels
Seconds = tuple[float, float]  # forward, backward


def groups_of(query_heads: int, key_heads: int, ranks: int) -> tuple[int, ...]:
    """In which groups a rank's heads may be exchanged: how many key heads of its own each has, and the query heads that
    share them. The first and the last are small: nothing runs beside the way of the one, and the way home of the
    other."""
    own = key_heads // ranks
    if key_heads % ranks or query_heads % key_heads or own < 2:
        return (1,)
    edge = max(own // 4, 1)
    return (edge, own - 2 * edge, edge) if own > 2 * edge else (edge, edge)


@dataclass(frozen=True)
class Sizes:
    """Of a layer's attention and of who shares it. kept: the part of all pairs that the mask keeps; spread: the nodes
    that ranks are on."""

    ranks: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dim_v: int = 128
    batch: int = 1
    kept: float = 0.5
    spread: int = 1

    @property
    def ideal(self) -> Seconds:
        """A rank's share of what one GPU takes."""
        pairs = self.batch * self.heads * self.length**2 * self.kept / self.ranks
        both = 2 * (self.dim + self.dim_v)
        return pairs * both / RATES[0], pairs * (both + 6 * self.dim) / RATES[1]

    @property
    def tail(self) -> float:
        """Half of the longest item of a forward launch."""
        return QUERIES * self.length * (self.dim + self.dim_v) * BLOCKS / RATES[0]

    @property
    def keys(self) -> float:
        """Entries of k and v."""
        return self.batch * self.length * self.kv_heads * (self.dim + self.dim_v)

    @property
    def in_turns(self) -> bool:
        """Is some of it sent beside the first kernels?"""
        queries = self.batch * self.length * self.heads * self.dim
        return self.spread == 1 and 2 * (queries + self.keys) >= WORTH * self.ranks

    @property
    def others(self) -> float:
        """The part of a sequence that other ranks hold."""
        return 1 - 1 / self.ranks


def gather(sizes: Sizes) -> Seconds:
    """All keys to each rank, in turns half of them before its first run; sums of their gradients home, in fp32."""
    link = WITHIN if sizes.spread == 1 else min(WITHIN, NODE * BETWEEN)  # a ring of NCCL's uses all NICs of a node
    forward, backward = sizes.ideal
    passes = 0 if sizes.spread == 1 else PASSES  # within a node tokens are sent to where they belong
    waited = 0.5 if sizes.in_turns else 1
    sent = sizes.keys * 2 * (waited * sizes.others / link + passes / MEMORY)
    forward += sizes.tail * (1 + 0.5 / sizes.ranks) + sent
    return forward, backward + sizes.keys * 4 * (sizes.others / link + max(passes, 1) / MEMORY)  # and are added up


def heads(sizes: Sizes) -> Seconds:
    """Tokens exchanged for heads, by groups: q, k and v, and o back; backward their gradients, at once."""
    kv_heads = math.lcm(sizes.kv_heads, sizes.ranks)  # which are repeated
    tokens, link = sizes.batch * sizes.length / sizes.ranks, WITHIN if sizes.spread == 1 else BETWEEN
    there = tokens * (sizes.heads * sizes.dim + kv_heads * (sizes.dim + sizes.dim_v))
    home = tokens * sizes.heads * sizes.dim_v
    groups = groups_of(sizes.heads, sizes.kv_heads, sizes.ranks) if sizes.in_turns else (1,)
    waited = (there * groups[0] + home * groups[-1]) / sum(groups)
    forward, backward = sizes.ideal
    packed, moved = (2 * (there + home) * each for each in (PACKED / MEMORY, sizes.others / link))
    return forward + sizes.tail + packed + 2 * waited * sizes.others / link, backward + packed + moved


def ring(sizes: Sizes) -> Seconds:
    """Keys of one rank at a time, sent while those before are attended to; rows of a step in fp32, joined. Two ranks
    gather."""
    if sizes.ranks == 2:
        return gather(sizes)
    link = WITHIN if sizes.spread == 1 else BETWEEN
    own, rows = sizes.keys / sizes.ranks, sizes.batch * sizes.length / sizes.ranks * sizes.heads
    join = 8 * rows * sizes.dim_v / MEMORY  # a step's part is written, and read where all are added up
    add = (16 * own + 12 * rows * sizes.dim) / MEMORY  # to sums of dK and dV that came, and to dQ
    forward, backward = (ideal / sizes.ranks for ideal in sizes.ideal)
    step, back = forward + 4 * sizes.tail / sizes.ranks + join, backward + 8 * sizes.tail / sizes.ranks + add
    moved = 2 * own / link, 6 * own / link
    steps = sizes.ranks - 1
    return step + steps * max(step, moved[0]), back + steps * max(back, moved[1]) + 4 * own / link


def pair(inner: Callable[[Sizes], Seconds], sizes: Sizes) -> Seconds:
    """Heads within each node, and between nodes keys of a node's share of the heads, by `inner`."""
    nodes = sizes.ranks // NODE
    kv_heads = math.lcm(sizes.kv_heads, NODE)
    within = Sizes(NODE, sizes.length // nodes, sizes.heads, kv_heads, sizes.dim, sizes.dim_v, sizes.batch, 0.0)
    between = Sizes(nodes, sizes.length, sizes.heads // NODE, kv_heads // NODE, sizes.dim, sizes.dim_v, sizes.batch,
                    sizes.kept, nodes)  # fmt: skip
    exchange, rest = heads(within), inner(between)
    return exchange[0] - within.tail + rest[0], exchange[1] + rest[1]


def choose(sizes: Sizes) -> str:
    """The faster of "gather" and "heads", forward and backward."""
    divides = sizes.heads % sizes.ranks == 0
    return "heads" if divides and sum(heads(sizes)) < sum(gather(sizes)) else "gather"


def efficiency(found: Seconds, sizes: Sizes) -> tuple[float, float]:
    """A rank's share of one GPU's time over its own: 1 is ideal."""
    ideal = sizes.ideal
    return ideal[0] / found[0], ideal[1] / found[1]
