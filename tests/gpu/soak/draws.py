"""One draw of the soak: a program, a batch, lengths and documents, all from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.gpu.soak import cached
from tests.gpu.soak.parts import MASKS
from tests.gpu.soak.programs import CACHED_SHARE, OF_TENSORS, PACKED_SHARE, PROGRAMS, Linear, Program

TOKENS = 1 << 28  # numbers in the largest of q, k, v, o: half a gigabyte
PAIRS = 1 << 33  # query rows of one key head times keys, as the yardstick meets them
MOST_BATCHES, MOST_DOCUMENTS = 8, 200
PACKINGS = ("even", "uneven", "tiny", "padded")
# batch, length, packing, documents: where packed causal documents with grouped heads once did not come back
HARD = (
    (2, 8192, "even", 8), (1, 12288, "even", 12), (1, 16384, "even", 16), (1, 16384, "uneven", 16),
    (1, 8192, "uneven", 8), (1, 65536, "uneven", 64), (1, 65536, "even", 64), (2, 32768, "uneven", 30),
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """program: its place in PROGRAMS; keys: their number, where it is not that of the queries; small: few heads."""

    program: int
    batch: int
    queries: int
    keys: int = 0
    packing: str = "even"
    documents: int = 1
    seed: int = 0
    small: bool = False

    @property
    def of(self) -> Program | Linear | cached.Cached:
        """The program."""
        found = PROGRAMS[self.program]
        return found.small() if self.small else found

    @property
    def kv_length(self) -> int:
        return self.keys or self.queries

    def __str__(self) -> str:
        words = [self.of.name, f"B {self.batch} S {self.queries}"]
        words += [f"keys {self.keys}"] * bool(self.keys)
        words += [f"in {self.of.shape(self)[1]} parts"] if isinstance(self.of, cached.Cached) else []
        if isinstance(self.of, Program) and "documents" in self.of.mask:
            words.append(f"{self.documents} {self.packing}")
        return " | ".join([words[0], " ".join(words[1:])])


def draw(seed: int, number: int, tiny: bool = False) -> Draw:
    """The draw of that number: the same in every process."""
    if (of_cache := random.Random(f"soak {seed} {number} cached")).random() < CACHED_SHARE:
        return _of_cache(of_cache, tiny)
    rng = random.Random(f"soak {seed} {number}")
    place = 0 if rng.random() < PACKED_SHARE else rng.randrange(len(OF_TENSORS))
    own = rng.randrange(1 << 31)
    if tiny:
        found = Draw(place, rng.randint(1, 2), rng.randint(1, 150), small=True, seed=own)
        return replace(found, packing=rng.choice(PACKINGS), documents=rng.randint(1, 7))
    if place == 0 and rng.random() < 0.6:
        batch, length, packing, documents = rng.choice(HARD)
        return Draw(0, batch, length, packing=packing, documents=documents, seed=own)
    program = OF_TENSORS[place]
    length = _length(rng, program)
    room = TOKENS // (length * program.heads * (max(program.dim, program.dim_v)))
    batch = rng.randint(1, max(1, min(MOST_BATCHES, room)))
    found = Draw(place, batch, length, seed=own)
    if isinstance(program, Linear):
        return found
    if "bias" in program.learned:
        batch = min(batch, 2)
    documents = min(MOST_DOCUMENTS, max(1, int(2 ** rng.uniform(0, 7.7))))
    keys = 0 if program.square or rng.random() < 0.7 else _length(rng, program)
    return replace(found, batch=batch, packing=rng.choice(PACKINGS), documents=documents, keys=keys)


def _of_cache(rng: random.Random, tiny: bool) -> Draw:
    place, (batch, queries, keys) = rng.randrange(len(cached.PROGRAMS)), cached.drawn(rng, tiny)
    return Draw(len(OF_TENSORS) + place, batch, queries, keys, seed=rng.randrange(1 << 31), small=tiny)


def _length(rng: random.Random, program: Program | Linear) -> int:
    """From 1k to 64k, as often round as not, and no longer than the yardstick has time for."""
    longest = program.longest
    if isinstance(program, Program) and not MASKS[program.mask].local:
        longest = min(longest, int((PAIRS / program.group) ** 0.5))
    length = int(1024 * (longest / 1024) ** rng.random())
    unit = rng.choice((1, 1, 128, 1024))
    return max(1024, length // unit * unit)
