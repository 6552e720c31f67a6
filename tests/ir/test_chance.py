"""The random numbers of dropout: Philox's published answers, one number for a pair whoever asks, no pattern in them."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch

from attention_engine.ir.chance import MOST_SEED, RANGE, chance, philox, threshold

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


def test_pairs_of_a_cell_are_sixteen_bytes_of_four_words():
    words = philox((32, 2, 16, 3), (9, 0))
    bytes_of_words = [(word >> shift) & 0xFF for word in words for shift in (0, 8, 16, 24)]
    first = [chance(9, 2, 3, 32 + q, 16 + k) >> 24 for q in (0, 1, 8, 9) for k in (0, 1, 8, 9)]
    assert sorted(first) == sorted(bytes_of_words)


@functools.cache
def numbers(seed, b=0, h=0):
    """Of 1e7 pairs, a few rows at a time, as 32 bits."""
    parts = PLACES.split(64)
    found = [chance(torch.tensor([seed]), torch.tensor(b), torch.tensor(h), q[:, None], PLACES[None]) for q in parts]
    return torch.cat([(part - RANGE // 2).int() for part in found])


def dropped(probability, seed=1, b=0, h=0):
    return numbers(seed, b, h) < threshold(probability) - RANGE // 2


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


def test_numbers_are_uniform_over_32_bits():
    found = (numbers(1).long() + RANGE // 2).view(SIDE // 16, 2, 4, 2, SIDE // 16, 2, 4, 2)[:, 0, :, 0, :, 0, :, 0]
    for shift in (24, 16, 8, 0):  # behind their own bytes the pairs of a cell have the same ones: one is looked at
        counts = torch.bincount(((found >> shift) & 0xFF).flatten(), minlength=256).double()
        expected = found.numel() / 256
        assert is_chance(float(((counts - expected).square() / expected).sum()) - 255, math.sqrt(2 * 255))


def test_a_probability_is_kept_to_the_last_of_32_bits():
    assert threshold(0.0) == 0
    assert threshold(0.5) == RANGE // 2
    assert abs(threshold(0.1) / RANGE - 0.1) <= 0.5 / RANGE
    assert threshold(1 - 2**-40) == RANGE - 1
