"""The random numbers of dropout: Philox's published answers, one number for a pair whoever asks, no pattern in them."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch

from attention_engine.ir.chance import MOST_SEED, RANGE, SHARED, chance, philox, threshold

ONES = 0xFFFF_FFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
PUBLISHED = [  # counter, key, rounds, words: the file kat_vectors of Random123, the authors' own library
    ((0, 0, 0, 0), (0, 0), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((ONES,) * 4, (ONES, ONES), 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ((0, 0, 0, 0), (0, 0), 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
SIDE = 3200  # queries, and keys: 1e7 pairs
PLACES = torch.arange(SIDE)
SIGMAS = 5.0


@pytest.mark.parametrize(("counter", "key", "rounds", "words"), PUBLISHED)
def test_philox_gives_the_published_words(counter, key, rounds, words):
    assert philox(counter, key, rounds) == words


def test_tensors_and_python_integers_give_the_same_numbers():
    draw = random.Random(0)
    for seed in (0, 1, 2**31, 2**32 + 7, MOST_SEED):
        b, h = draw.randrange(2**16), draw.randrange(2**16)
        first = draw.randrange(2**25)
        q, k = torch.arange(first, first + 40)[:, None], torch.arange(33)[None]
        found = chance(torch.tensor([seed]), torch.tensor(b), torch.tensor(h), q, k)
        assert found.tolist() == [[chance(seed, b, h, int(i), int(j)) for j in k[0]] for i in q[:, 0]]


def test_pairs_of_a_cell_are_sixteen_places_of_eight_halves_of_words():
    words = philox((32, 2, 16, 3), (9, 0))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    of_places = [sum((half >> place & 1) << 7 - n for n, half in enumerate(halves)) for place in range(16)]
    found = [chance(9, 2, 3, 32 + q, 16 + k) for odd in (0, 1) for q in (0, 8, 1, 9) for k in (odd, odd + 8)]
    assert [number >> SHARED for number in found] == of_places
    assert {number & 2**SHARED - 1 for number in found} == {(halves[0] ^ halves[2] >> 1) & 0x7FFF}


@functools.cache
def numbers(seed, b=0, h=0):
    """Of 1e7 pairs, a few rows at a time."""
    parts = PLACES.split(64)
    found = [chance(torch.tensor([seed]), torch.tensor(b), torch.tensor(h), q[:, None], PLACES[None]) for q in parts]
    return torch.cat([part.int() for part in found])


def dropped(probability, seed=1, b=0, h=0):
    return numbers(seed, b, h) < threshold(probability)


def share(found):
    return float(found.count_nonzero()) / found.numel()


def correlation(here, there, probability):
    joint = share(here & there) - probability * (share(here) + share(there)) + probability**2
    return joint / (probability * (1 - probability))


def is_chance(value, deviation):
    return abs(value) < SIGMAS * deviation


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_the_share_that_is_dropped_is_the_probability(probability):
    found = dropped(probability)
    spread = math.sqrt(probability * (1 - probability))
    assert is_chance(share(found) - probability, spread / SIDE)
    for dim in (0, 1):  # of each column, of each row: as far from it as chance allows, and no less
        apart = found.count_nonzero(dim).double() / SIDE - probability
        assert apart.abs().max() < (SIGMAS + 1) * spread / math.sqrt(SIDE)
        assert is_chance(float(apart.square().mean()) * SIDE / spread**2 - 1, math.sqrt(2 / SIDE))


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_no_pair_tells_another(probability):
    found = dropped(probability)
    steps = [(0, 1), (1, 0), (1, 1), (0, 8), (8, 0), (8, 8), (9, 9), (1, 8), (0, 2), (2, 0), (4, 0), (16, 0), (0, 16)]
    for down, right in steps:
        here, there = found[: SIDE - down, : SIDE - right], found[down:, right:]
        assert is_chance(correlation(here, there, probability), 1 / math.sqrt(here.numel())), (down, right)
    assert is_chance(correlation(found, found.T, probability), 2 / SIDE)
    for seed, b, h in ((2, 0, 0), (1 + 2**32, 0, 0), (1, 0, 1), (1, 1, 0)):
        assert is_chance(correlation(found, dropped(probability, seed, b, h), probability), 1 / SIDE), (seed, b, h)


def test_numbers_are_uniform_over_23_bits():
    found = numbers(1).view(SIDE // 16, 2, 4, 2, SIDE // 16, 2, 4, 2)[:, 0, :, 0, :, 0, :, 0]
    for shift in (15, 8, 0):  # behind their own bits the pairs of a cell have the same ones: one is looked at
        counts = torch.bincount(((found >> shift) & 0xFF).flatten(), minlength=256).double()
        expected = found.numel() / 256
        assert is_chance(float(((counts - expected).square() / expected).sum()) - 255, math.sqrt(2 * 255))


def test_what_a_cell_shares_is_uniform_whatever_a_pair_s_own_bits_are():
    """Of each of the sixteen places: for one value of the own bits, how often each shared bit is 1."""
    cells = numbers(1).view(SIDE // 16, 2, 4, 2, SIDE // 16, 2, 4, 2)
    bits = torch.arange(SHARED)
    for place in range(16):
        found = cells[:, place >> 3, :, place >> 2 & 1, :, place >> 1 & 1, :, place & 1].flatten()
        for own in (25, 128, 255):
            tied = found[found >> SHARED == own]
            ones = (tied[:, None] >> bits & 1).double().mean(0) - 0.5
            assert ones.abs().max() < (SIGMAS + 1) * 0.5 / math.sqrt(len(tied)), (place, own)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_pairs_of_a_cell_are_dropped_one_by_one(probability):
    """How many of sixteen: as often as of independent pairs."""
    cells = dropped(probability).view(SIDE // 16, 2, 4, 2, SIDE // 16, 2, 4, 2)
    counts = torch.bincount(cells.sum((1, 3, 5, 7)).flatten(), minlength=17).double()
    ways = torch.tensor([math.comb(16, n) * probability**n * (1 - probability) ** (16 - n) for n in range(17)])
    expected = ways.double() * counts.sum()
    some = expected > 20
    chi = float(((counts - expected)[some].square() / expected[some]).sum())
    assert chi < int(some.sum()) + SIGMAS * math.sqrt(2 * int(some.sum()))


def test_a_probability_is_kept_to_the_last_of_23_bits():
    assert threshold(0.0) == 0
    assert threshold(0.5) == RANGE // 2
    assert abs(threshold(0.1) / RANGE - 0.1) <= 0.5 / RANGE
    assert threshold(1 - 2**-40) == RANGE - 1
