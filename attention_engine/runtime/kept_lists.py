"""Lists of tiles that a mask keeps: what kernels made of its tensors, for as long as those say the same.

A BlockMask of FlexAttention is made once, outside of the calls that it serves, and never sees that a tensor which its
function captured is written later. A mask here holds its function alone. So the second call of a mask keeps the lists
that it makes, forward and backward each, and later ones use them while the tensors' version counters stand: those of
autograd, which tell of writes by torch. Writes by other kernels don't show, nor those of a graph that is replayed: as
with FlexAttention's masks, make a new mask then. A mask that serves one call, or none twice, keeps nothing. A graph
that is captured makes its own lists, so that its replays see what tensors hold then; so does compiled code.

What is kept lies on the device: rows of tiles times tiles in a row, 4 bytes each, forward once and backward twice that,
for each batch and head that the mask tells apart. 8192 queries and keys keep 50 KB, 131072 keep 13 MB. What would
come to more than MOST_BYTES is made in each call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from attention_engine.runtime.arguments import MOST_PLANS
from attention_engine.runtime.gpu import is_capturing, stream_of

Results: TypeAlias = dict[str, Tensor]
State: TypeAlias = tuple[int, ...]  # of tensors: what changes where one is written, or gets other memory
Place: TypeAlias = tuple[tuple[int, int], State]  # which lists, on which stream; of which state
MOST_BYTES = 32 << 20  # of a mask's lists
MOST = 16  # lists of a mask: of each direction, of each stream


class KeptLists:
    """The lists of a mask that holds these tensors. What holds it (a mask) decides how long it lives.

    found: do calls find it by each of its tensors? Another mask may hold one of them, and others.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.first, self.each = weakref.ref(tensors[0]), [weakref.ref(t) for t in tensors]
        self.tensors = {id(t): each for t, each in zip(tensors, self.each, strict=True)}
        self.made: dict[object, tuple[State, Results]] = {}
        self.found = False

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Are these its tensors, in their order?"""
        if len(tensors) != len(self.each) or self.first() is not tensors[0]:
            return False
        return len(tensors) == 1 or all([of() is t for of, t in zip(self.each, tensors)])

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Are all of these among them?"""
        of = self.tensors
        return all([id(t) in of and of[id(t)]() is t for t in tensors])

    def find(self, place: Place) -> Results | None:
        """What is kept in a place, if the tensors say what they said."""
        found = self.made.get(place[0])
        return found[1] if found is not None and found[0] == place[1] else None

    def keep(self, place: Place, results: Results) -> None:
        """Keeps results where there is room, in place of those of another state."""
        self.made.pop(place[0], None)
        if len(self.made) >= MOST:
            self.made.pop(next(iter(self.made)), None)
        if sum([_bytes_of(kept) for _, kept in [*self.made.values()]]) + _bytes_of(results) <= MOST_BYTES:
            self.made[place[0]] = place[1], results


HELD: weakref.WeakValueDictionary[int, KeptLists] = weakref.WeakValueDictionary()  # by the id of each of its tensors


def hold(tensors: Sequence[Tensor], before: KeptLists | None) -> KeptLists | None:
    """The lists of these tensors, which calls find from now on as long as somebody holds them: those `before`, if they
    are of these tensors. None where a write would not show."""
    if before is not None and before.found and before.holds(tensors):
        return before
    if not tensors or not all([type(t) in (Tensor, Parameter) and not t.is_inference() for t in tensors]):
        return None
    if before is None or not before.holds(tensors):
        known = HELD.get(id(tensors[0]))
        before = known if known is not None and known.holds(tensors) else KeptLists(tensors)
    for tensor in tensors:
        other = HELD.get(id(tensor))
        if other is not None and other is not before:
            other.found = False
        HELD[id(tensor)] = before
    before.found = True
    return before


NUMBERS: dict[object, int] = {}
COUNT = itertools.count()


def number_of(key: object) -> int:
    """A number for a key: quicker to look up than all that a kernel is made of."""
    if key not in NUMBERS:
        if len(NUMBERS) >= MOST_PLANS:
            NUMBERS.clear()  # keys get others: what is kept under the old ones is made once more
        NUMBERS[key] = next(COUNT)
    return NUMBERS[key]


def place_in(tensors: Sequence[Tensor], number: int, device: torch.device) -> Place | None:
    """Where lists are that a launch makes of these tensors; None where a graph is captured, which makes its own.

    number: of all that the launch is told beside them.
    """
    if is_capturing(device):
        return None
    if len(tensors) == 1:
        (one,) = tensors
        return (number, stream_of(device)), (one._version, one.data_ptr())
    return (number, stream_of(device)), tuple([n for t in tensors for n in (t._version, t.data_ptr())])


def share(tensors: Sequence[Any], number: int, device: torch.device, make: Callable[[], Results]) -> Results:
    """What a launch makes of these tensors: kept, where a mask holds them, or made now."""
    if not HELD or is_compiling() or not all([isinstance(t, Tensor) for t in tensors]):
        return make()
    lists = HELD.get(id(tensors[0]))
    if lists is None or not lists.is_of(tensors):  # a number without dims is handed on as a view of one entry
        tensors = [t if t._base is None else t._base for t in tensors]
        lists = HELD.get(id(tensors[0]))
    place = None if lists is None or not lists.is_of(tensors) else place_in(tensors, number, device)
    if lists is None or place is None:
        return make()
    found = lists.find(place)
    if found is None:
        found = make()
        lists.keep(place, found)
    return found


def _bytes_of(results: Results) -> int:
    return sum([t.numel() * t.element_size() for t in results.values()])
