"""flex_attention inside torch.compile: the compiler traces the functions, and an engine is made of the graph it draws.

The functions run once on numbers that stand for a pair, as in torch's own FlexAttention. So whatever they capture
(tensors of the compiled function, attributes of modules, numbers) becomes an input of that graph. What runs in its
place is an engine, whose score_mod and mask_mod replay the graph on symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper

from attention_engine.flex.engines import build
from attention_engine.flex.options import Options
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.runtime.finding import KEPT
from attention_engine.runtime.inputs import follow_autocast

LIBRARY = torch.library.Library("attention_engine", "FRAGMENT")
LIBRARY.define(
    "flex_pair(Tensor q, Tensor k, Tensor v, Tensor score, Tensor b, Tensor h, Tensor q_idx, Tensor kv_idx, "
    "Tensor found, Tensor? keep, Tensor? seed, str online, str[] rows, str backend, bool deterministic, "
    "float dropout_p) "
    "-> (Tensor, Tensor[])"
)
PLACES = 8  # the arguments before what the functions found: tensors of the call, and the numbers of a pair
ONLINE: dict[str, OnlineFunc] = {}


def _fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, list[Tensor]]:
    *_, rows, _, _, _ = more
    batch, heads, queries, _ = q.shape
    o = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    return o, [q.new_empty(batch, heads, queries, dtype=kind) for _ in rows]


torch.library.register_fake("attention_engine::flex_pair", _fake, lib=LIBRARY)


def _never(ctx: Any, *arriving: Any) -> Any:
    raise AssertionError("the graph that holds this op runs as an engine")


torch.library.register_autograd("attention_engine::flex_pair", _never, lib=LIBRARY)


def run(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any, online_func: OnlineFunc | None,
    scale: float, maxima: bool, options: Options, rows: bool, seed: Tensor | None,
) -> Any:  # fmt: skip
    """What the engine of these functions returns: the output, or (output, rows by name). Compilers trace this."""
    query, key, value = follow_autocast(query, key, value)
    online = "" if online_func is None else _name_of(online_func)
    names = _names_of_rows(online, maxima) if rows else ()
    backend, deterministic, dropout_p = options
    if seed is None:
        dropout_p = 0.0  # which a compiler of open numbers takes for a constant

    def pair(
        q: Tensor, k: Tensor, v: Tensor, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Any:
        scaled = score * scale  # by the graph: a compiler may leave the number open
        found = scaled if score_mod is None else score_mod(scaled, b, h, q_idx, kv_idx)
        keep = None if mask_mod is None else mask_mod(b, h, q_idx, kv_idx)
        if not isinstance(found, Tensor):
            found = score * 0 + found
        if isinstance(keep, bool):
            keep = None if keep else q_idx != q_idx
        made = torch.ops.attention_engine.flex_pair(
            q, k, v, score, b, h, q_idx, kv_idx, found, keep, seed, online, list(names), backend, deterministic,
            dropout_p,
        )  # fmt: skip
        return (made[0], *made[1])

    score = query.new_zeros(1, dtype=torch.float32)  # of one number: indexed by it, a tensor is read without a look
    place = [query.new_zeros(1, dtype=torch.int32) for _ in range(4)]
    output, *found = dynamo_bypassing_wrapper(_instead, pair, query, key, value, score, *place)
    return (output, dict(zip(names, found))) if rows else output


def _name_of(online_func: OnlineFunc) -> str:
    """Where a normaliser stands among ONLINE."""
    name = f"{id(online_func)}"
    while len(ONLINE) >= KEPT and name not in ONLINE:
        del ONLINE[next(iter(ONLINE))]
    ONLINE[name] = online_func
    return name


def _names_of_rows(online: str, maxima: bool) -> tuple[str, ...]:
    """The rows that the normaliser returns."""
    if online:
        return tuple(ONLINE[online].final_rowscales)
    return ("lse", "max_scores") if maxima else ("lse",)


_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined] # as Engine._key is
_names_of_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- below the compiler, which has drawn the graph of `pair`


def _instead(graph: fx.GraphModule) -> Callable[..., tuple[Tensor, ...]]:
    """What runs in place of the graph that a compiler drew of `pair`."""
    nodes = list(graph.graph.nodes)
    (made,) = [n for n in nodes if n.target in _OPS]
    inputs = [n for n in nodes if n.op == "placeholder"]

    def call(*given: Any) -> tuple[Tensor, ...]:
        values = dict(zip(inputs, given, strict=True))
        *_, found, keep, seed, online, rows, backend, deterministic, dropout_p = made.args
        names = made.args[:PLACES]
        q, k, v = (values[n] for n in names[:3])
        score_mod = _Replayed(graph, found, names[3:], values, q)
        mask_mod = None if keep is None else _Replayed(graph, keep, names[4:], values, q)
        if isinstance(dropout_p, fx.Node):  # another number is another kernel
            dropout_p = float(values[dropout_p])
        engine = build(
            score_mod, mask_mod, ONLINE.get(online), 1.0, "max_scores" in rows and not online,
            Options(backend, deterministic, dropout_p),
        )  # fmt: skip
        named = {} if seed is None else {"dropout_seed": values[seed]}
        if not rows:
            return (engine(q, k, v, **named),)
        output, returned = engine(q, k, v, return_rowscales=True, **named)
        return (output, *[returned[name] for name in rows])

    return call


_OPS = (torch.ops.attention_engine.flex_pair, torch.ops.attention_engine.flex_pair.default)


class _Replayed:
    """A function that a compiler traced: the part of a graph that makes a node of the numbers of a pair."""

    def __init__(
        self, graph: fx.GraphModule, result: fx.Node, places: Sequence[fx.Node], values: Mapping[fx.Node, Any],
        like: Tensor,
    ) -> None:  # fmt: skip
        """places: the nodes that the arguments take the place of; values: of the graph's other inputs; like: q."""
        self.graph, self.result, self.places, self.like = graph, result, places, like
        needed, waiting = set[fx.Node](), [result]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        self.values = {n: self._plain(x) for n, x in values.items() if n in needed}
        self.nodes = [n for n in graph.graph.nodes if n in needed and n.op != "placeholder"]
        self.__qualname__ = "compiled"

    def __call__(self, *place: Any) -> Any:
        found = {**self.values, **dict(zip(self.places, place, strict=True))}
        for node in self.nodes:
            args, named = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = self._plain(self._value(node, args, named))
        return found[self.result]

    def _plain(self, value: Any) -> Any:
        """A number that the compiler leaves open: integers are settled, and others compiled anew; floats are read."""
        if isinstance(value, torch.SymInt):
            return int(value)
        if isinstance(value, torch.SymFloat):
            kind, number = torch.promote_types(self.like.dtype, torch.float32), cast(float, value)
            return torch.full((), number, dtype=kind, device=self.like.device)
        return value

    def _value(self, node: fx.Node, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **named)
        if node.op == "get_attr":
            found: Any = self.graph
            for name in str(node.target).split("."):
                found = getattr(found, name)
            return found
        target: Any = node.target
        return target(*args, **named)
