"""Works round a defect of TileLang 0.1.15: where tiles lie in shared memory differs from process to process.

The pass that lays them out sorts them by name. Tiles that share a name stay in the order of a table of addresses, which
no process has in common with another; and the name by which one of them asks for an alignment is the name of all. Here
each tile has a name of its own when that pass begins, by the order in which the kernel declares them, and the alignment
that its old name asked for. No flag in the compiler's cache key says so: it is one of the layouts that TileLang chose
from, all of them right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace

ALIGNMENTS = "tl.smem_alignment_map"  # an attribute of functions: bytes by the name of a tile


def put() -> Undo:
    """Tiles get their names before TileLang lays them out."""
    import tilelang

    theirs = tilelang.transform.MergeSharedMemoryAllocations

    def named_and_merged(*given: Any, **options: Any) -> Callable[[Any], Any]:
        merge: Callable[[Any], Any] = theirs(*given, **options)
        return (lambda module: merge(_make_pass()(module))) if inside() else merge

    return replace((tilelang.transform, "MergeSharedMemoryAllocations", named_and_merged))


def _make_pass() -> Callable[[Any], Any]:
    from tvm import tirx

    def rewrite(function: Any, module: object, context: object) -> Any:
        return with_own_names(function)

    made: Callable[[Any], Any] = tirx.transform.prim_func_pass(rewrite, opt_level=0, name="attention_engine.NameTiles")
    return made


def with_own_names(function: Any) -> Any:
    """The function, no two of whose tiles in shared memory share a name."""
    from tvm import tirx

    tiles = _tiles(function)
    taken, first, renamed = Counter(tile.name for tile in tiles), set(), {}
    for tile in tiles:
        if tile.name in first:
            renamed[tile] = tirx.Var(_free(tile.name, taken), tile.type_annotation)
        first.add(tile.name)
    if not renamed:
        return function
    found = function.with_body(tirx.stmt_functor.substitute(function.body, renamed))
    alignments: Mapping[Any, Any] | None = (function.attrs or {}).get(ALIGNMENTS)
    if alignments is None:
        return found
    asked = {str(name): bytes_ for name, bytes_ in alignments.items()}
    own = {new.name: asked[old.name] for old, new in renamed.items() if old.name in asked}
    return found.with_attr(ALIGNMENTS, {**asked, **own})


def _tiles(function: Any) -> list[Any]:
    """The variables of tiles in shared memory, as they are declared."""
    from tvm import tirx

    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.AllocBuffer) and str(node.buffer.scope()).startswith("shared"):
            found.append(node.buffer.data)

    tirx.stmt_functor.post_order_visit(function.body, visit)
    return found


def _free(name: str, taken: Counter[str]) -> str:
    """A name that no tile has yet, of this one and a number."""
    number = 1
    while taken[f"{name}_{number}"]:
        number += 1
    taken[f"{name}_{number}"] += 1
    return f"{name}_{number}"


PATCH = Patch(
    defect="tiles in shared memory that share a name lie in the order of their addresses, and share alignments",
    version="0.1.15",
    proof="test_tilelang_lays_out_tiles_of_one_name_by_address",
    put=put,
)
