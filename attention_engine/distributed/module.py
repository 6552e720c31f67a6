"""ContextParallel: an engine whose sequences are split among ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh

from attention_engine.distributed import compiled, cost
from attention_engine.distributed.agree import check_agreement
from attention_engine.distributed.block_gradients import BlockGradients
from attention_engine.distributed.deal import deal
from attention_engine.distributed.exchange import Ranks
from attention_engine.distributed.layout import Layout
from attention_engine.distributed.methods import Call, attend_together
from attention_engine.distributed.needs import KeptPieces
from attention_engine.distributed.placements import Placement, placements
from attention_engine.distributed.ring import RingAttention
from attention_engine.distributed.split import METHODS, PAIRS, Split
from attention_engine.distributed.states import attend_by_states
from attention_engine.errors import LengthNotInLayout, OptionsClash, UnknownOption, as_given
from attention_engine.ir.program import H
from attention_engine.passes.analyse_mask import Bound
from attention_engine.passes.starts import Dimension, lists_queries, own_rows
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.runtime.begins_anew import BeginsAnew
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.dropout import check_seed, seed_tensor
from attention_engine.runtime.gpu import is_capturing
from attention_engine.runtime.inputs import check_ranks, check_type, follow_autocast, order_custom
from attention_engine.runtime.linear import LinearAttentionEngine
from attention_engine.runtime.module import AttentionEngine

Method: TypeAlias = (
    Literal["auto", "gather", "ring", "heads", "states"] | tuple[Literal["gather", "ring", "heads"], ...]
)
Known: TypeAlias = tuple[list[Placement], tuple[Bound, ...], Collection[Dimension], bool]
Balance: TypeAlias = Literal["auto", "contiguous", "zigzag"] | Layout
BALANCES = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag}
METHODS_OF: dict[tuple[bool, int], tuple[Any, ...]] = {  # (a linear engine?, dimensions of the mesh)
    (False, 1): ("auto", *METHODS), (False, 2): ("auto", *PAIRS), (True, 1): ("auto", "states"),
}  # fmt: skip
NUMBERS = count()
MOST_LENGTHS = 64  # that are remembered
OF_THIS_PROCESS = ("split", "key", "_agreed", "_made", "_in_blocks", "_found")  # a process group has no copy


class ContextParallel(BeginsAnew):
    """An attention over sequences that are split among the ranks of a device mesh. Each rank holds some tokens of each.

    The engine stays what it is: its masks, scores and custom inputs see the whole sequence's indices. A call takes this
    rank's q, k, v and returns its o; `shard`, `unshard` and `places` say which tokens those are. Custom inputs that are
    read at each query's own index (or each key's) come with this rank's tokens; all others come whole, on every rank,
    and their gradients are this rank's part, as a weight's are: DDP and FSDP over the mesh add them up.

    Args:
        engine: any AttentionEngine, or any LinearAttentionEngine.
        mesh: a DeviceMesh of one dimension, as `init_device_mesh("cuda", (8,))` or `mesh["cp"]`, or of two.
        method: "gather" brings all keys to each rank, "ring" those of one rank at a time, "heads" all tokens of some
            heads. "auto" is "gather" or "heads", the faster one by a cost model (for nodes of 8 GPUs). Of two
            dimensions a pair, in their order, one of them "heads"; "auto" is ("gather", "heads"), for nodes of several
            GPUs. Linear engines have "states" alone, and one dimension.
        balance: "contiguous" gives a rank neighbours, "zigzag" a piece and its mirror image. "auto" is "zigzag" for
            masks that show later queries more keys. Or a Layout, as `deal` makes of a mask's own counts.

    Raises:
        UnknownOption: an option has a value that means nothing.
        HeadsDoNotDivide: "heads", and the query heads can't be shared evenly.
        LengthNotInLayout: a tensor isn't this rank's part of a length that it was told.
        RanksDisagree: other ranks call for something else.
    """

    of_this_process = OF_THIS_PROCESS

    def __init__(
        self, engine: AttentionEngine | LinearAttentionEngine, mesh: DeviceMesh, method: Method = "auto",
        balance: Balance = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        linear = isinstance(engine, LinearAttentionEngine)
        if not linear:
            check_type("engine", engine, AttentionEngine)
        check_type("mesh", mesh, DeviceMesh)
        if mesh.ndim > (1 if linear else 2):
            raise UnknownOption(f"the mesh has {mesh.ndim} dimensions. Give one of them: mesh['cp'].")
        methods = METHODS_OF[linear, mesh.ndim]
        if (tuple(method) if isinstance(method, list) else method) not in methods:
            of = f"{type(engine).__name__} on a mesh of {mesh.ndim}"
            raise UnknownOption(f"method is {as_given(method)}. Choose {', '.join(map(repr, methods))} for {of}.")
        if not isinstance(balance, Layout) and balance not in ("auto", *BALANCES):
            known = ", ".join(map(repr, ("auto", *BALANCES)))
            raise UnknownOption(f"balance is {as_given(balance)}. Choose {known}, or give a Layout.")
        if not linear and engine.block_mask is not None:
            raise OptionsClash(
                "the engine has a block_mask that is a tensor, which can't be split.\n"
                "  Write it as a function: block_mask=lambda b, h, q_idx, kv_idx: ..."
            )
        self.engine, self.mesh, self.method, self.balance = engine, mesh, method, balance
        self._layouts: dict[int, Layout] = {}  # by length, the newest last
        self._begin()
        if isinstance(balance, Layout):
            self._know(balance)

    def _begin(self) -> None:
        """What a process knows of the mesh's groups, and has found out of calls: nothing so far."""
        mesh, method = self.mesh, self.method
        dims = [Ranks(mesh.get_group(n), mesh.size(n), mesh.get_local_rank(n)) for n in range(mesh.ndim)]
        roles = ("gather",) if mesh.ndim == 1 else ("gather", "heads") if method == "auto" else tuple(method)
        held = {"gather" if role == "ring" else role: ranks for role, ranks in zip(roles, dims, strict=True)}
        self.split = Split(held.get("heads"), held.get("gather"), "ring" in roles)
        self.device_type = mesh.device_type
        self._agreed: set[object] = set()
        self._made: dict[object, Any] = {}
        self._in_blocks: dict[object, RingAttention | BlockGradients | None] = {}
        self._found: Known | None = None
        self.key = f"ContextParallel {next(NUMBERS)}"  # by which compiled graphs find it
        compiled.KNOWN[self.key] = self

    def extra_repr(self) -> str:
        return f"method={self.method!r}, balance={self.balance!r}, rank={self.split.rank} of {self.split.size}"

    # ---- which tokens

    def _know(self, layout: Layout) -> Layout:
        """Remembers a layout as the newest; LengthNotInLayout where it leaves a rank without tokens."""
        if layout.ranks != self.split.size:
            raise LengthNotInLayout(f"the layout is for {layout.ranks} ranks, and the mesh has {self.split.size}.")
        if not all(layout.runs):
            raise LengthNotInLayout(
                f"a sequence of {layout.length} leaves one of {layout.ranks} ranks without tokens. Give a longer one."
            )
        self._layouts.pop(layout.length, None)
        self._layouts[layout.length] = layout
        if len(self._layouts) > MOST_LENGTHS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    def layout(self, length: int) -> Layout:
        """How a sequence of this length is split."""
        if isinstance(self.balance, Layout):
            if length != self.balance.length:
                raise LengthNotInLayout(
                    f"a sequence has length {length}, and the layout that was given is for {self.balance.length}."
                )
            return self.balance
        if length in self._layouts:
            return self._know(self._layouts[length])
        balance = self.balance
        if balance == "auto":
            linear = isinstance(self.engine, LinearAttentionEngine)
            later_is_longer = not linear and plan_tiles(self.engine._program.mask).later_is_longer
            balance = "zigzag" if later_is_longer else "contiguous"
        return self._know(BALANCES[balance](length, self.split.size))

    def places(self, length: int) -> Tensor:
        """The indices of this rank's tokens in a sequence of this length, in the order of its memory: for positions
        and labels."""
        return self.layout(length).places(self.split.rank).to(torch.empty(0, device=self.device_type).device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that is whole on every rank."""
        runs = self.layout(x.shape[dim]).runs[self.split.rank]
        return torch.cat([x.narrow(dim, run.start, run.count) for run in runs], dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor, on every rank. Its gradient is summed over ranks."""
        dim = dim % x.ndim
        return self.split.whole(x, self.layout_of(x.shape[dim], "x"), dim)

    def deal(self, length: int, **custom: Tensor) -> Layout:
        """A layout by the mask's own counts: pieces of the sequence, so that ranks have as much work each. For packed
        documents. custom: the custom inputs that the mask reads, whole, by name."""
        check_type("engine", self.engine, AttentionEngine)
        assert isinstance(self.engine, AttentionEngine)
        return deal(self.engine, length, self.split.size, custom)

    def layout_of(self, own: int, what: str) -> Layout:
        """The newest layout in which this rank holds so many tokens."""
        rank, size = self.split.rank, self.split.size
        for layout in reversed(self._layouts.values()):
            if layout.count(rank) == own:
                return layout
        if self._layouts or own == 0:
            known = ", ".join(f"{each.count(rank)} of {length}" for length, each in self._layouts.items()) or "none"
            raise LengthNotInLayout(
                f"{what} has {own} tokens, and rank {rank} of {size} holds {known}.\n"
                "  Split tensors by `shard`, or tell a length first: `places(length)`."
            )
        return self.layout(own * size)  # nobody told a length: all ranks hold as many

    # ---- calls

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *custom: Any, **named: Any) -> Any:
        """This rank's part of what the engine gives of the whole sequence. The arguments are the engine's.

        Args:
            q, k, v: this rank's tokens, in the layout of the engine. Keys may be of another sequence than queries. So
                is a linear attention's decay.
            custom, named: the engine's custom inputs: this rank's tokens of those that are read at each token's own
                index, else whole. What else the engine takes by name: `return_rowscales` returns the rows of this
                rank's queries. An `initial_state`, and the final one, are whole on every rank.
        """
        if isinstance(self.engine, LinearAttentionEngine):
            return attend_by_states(self, q, k, v, *custom, **named)
        return self._attend(q, k, v, *custom, **named)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor, return_rowscales: bool = False,
        dropout_seed: int | Tensor | None = None, **named: Tensor,
    ) -> Any:  # fmt: skip
        engine = self.engine
        assert isinstance(engine, AttentionEngine)
        check_ranks(engine.layout, q, k, v)
        q, k, v = follow_autocast(q, k, v)
        tensors, held = order_custom(engine.custom_io, custom, named), tensors_now(engine._captured)
        if engine.layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seed = self._seed(dropout_seed, q)
        if is_compiling():
            output, *found = compiled.attend(self.key, q, k, v, tensors, held, return_rowscales, seed)
            rows = dict(zip((n for n, _ in engine._program.finals), found, strict=False))
        else:
            output, rows = self.attend_tokens(q, k, v, tensors, held, return_rowscales, seed)
        output = output.transpose(1, 2) if engine.layout == "bhsd" else output
        return (output, rows) if return_rowscales else output

    def attend_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], held: Sequence[Tensor], returns_rows: bool,
        seed: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """The output of this rank's queries, and their rows. Tensors are (batch, length, heads, dim); held: what
        functions capture."""
        engine = self.engine
        assert isinstance(engine, AttentionEngine)
        of_q, of_k = self.layout_of(q.shape[1], "q"), self.layout_of(k.shape[1], "k")
        sizes = {"batch": q.shape[0], "heads": q.shape[2], "seq_len": of_q.length, "seq_len_kv": of_k.length}
        placed, bounds, own_heads, lists = self._known_of(engine)
        split = self._split_of(q, k, v, of_q)
        dealt = self._kept_by(of_q, of_k, (*tensors, *held))
        kept = None if is_capturing(q.device) else dealt
        made = self._made if kept is None else kept.made
        call = Call(
            engine, split, of_q, of_k, sizes, made, self._in_blocks, returns_rows, seed, bounds, own_heads, lists, held,
            kept,
        )  # fmt: skip
        call.check(q, k, v)
        for placement, tensor in zip(placed, tensors, strict=True):
            placement.check(tensor, sizes, {"seq_len": q.shape[1], "seq_len_kv": k.shape[1]})
        self.agree(of_q, of_k, dealt is not None, [q, k, v], tensors, placed)
        return attend_together(call, q, k, v, tensors, placed)

    def _kept_by(self, of_q: Layout, of_k: Layout, tensors: Sequence[Tensor]) -> KeptPieces | None:
        """What the layout knows of the keys that its queries may see, where it was dealt by these very tensors."""
        assert isinstance(self.engine, AttentionEngine)
        names = [*self.engine.custom_io.specs, *(one.name for one in self.engine._captured)]
        given, kept = dict(zip(names, tensors, strict=True)), of_q.kept
        if kept is None or of_q.length != of_k.length or not kept.holds(self.engine._program.mask, given):
            return None
        return kept

    def rows_of(self, device: torch.device) -> tuple[int, bool]:
        """How many rows a call returns, and whether kernels make them."""
        assert isinstance(self.engine, AttentionEngine)
        return len(self.engine._program.finals), self.engine._backend_for(device) != "reference"

    def _known_of(self, engine: AttentionEngine) -> Known:
        """Where custom inputs are, the mask's bounds, which dimensions hold heads of their own, and may queries of
        several runs be listed? Worked out once."""
        if self._found is None:
            program, specs = engine._program, engine.custom_io.in_order
            axes = {spec.name: spec.axes for spec in specs}
            heads, bounds = own_rows(program, axes, (H,)), plan_tiles(program.mask).bounds.bounds
            self._found = placements(program, specs), bounds, heads, lists_queries(program, axes)
        return self._found

    def _split_of(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Split:
        """Who exchanges and who gathers in a call. Of one dimension either do."""
        (ranks, *more) = self.split.groups
        if more:
            return self.split
        method: object = self.method
        if method == "auto":
            kept = 0.5 if layout.name == "zigzag" else 1.0
            widths = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
            method = cost.choose(cost.Sizes(ranks.size, layout.length, *widths, q.shape[0], kept, ranks.nodes))
        return Split(ranks, None) if method == "heads" else Split(None, ranks, method == "ring")

    def _seed(self, given: int | Tensor | None, q: Tensor) -> Tensor | None:
        """Of a call's dropped weights, one for all of its launches; None where none are dropped."""
        check_seed(given)
        assert isinstance(self.engine, AttentionEngine)
        return seed_tensor(given, q.device) if self.engine._drops else None

    def agree(
        self, of_q: Layout, of_k: Layout, kept: bool, given: Sequence[Tensor], custom: Sequence[Tensor],
        placed: Sequence[Placement],
    ) -> bool:  # fmt: skip
        """At the first call of a kind: RanksDisagree unless all ranks call for the same. Is it the first?

        kept: does the layout know which keys these tensors let ranks see?
        """
        signature = tuple((t.shape, t.dtype, t.requires_grad) for t in (*given, *custom))
        kind = of_q, of_k, kept, signature, torch.is_grad_enabled()
        if kind in self._agreed:
            return False
        facts: dict[str, object] = {
            "their attention": self.engine._program.fingerprint, "their method": self.method,
            "their layouts": (of_q.name, of_q.length, of_k.name, of_k.length),
            "whether they dealt the layout by these tensors": kept,
            "shapes, lengths aside": [(t.shape[0], *t.shape[2:]) for t in given],
            "dtypes": [t.dtype for t in given],
            "which gradients they ask for": [t.requires_grad and torch.is_grad_enabled() for t in (*given, *custom)],
        }  # fmt: skip
        whole = zip(placed, custom, strict=True)
        facts["shapes of custom inputs"] = [
            tuple(t.shape) for p, t in whole if p.queries is None and p.keys is None
        ]  # fmt: skip
        for ranks in self.split.groups:
            check_agreement(ranks, facts)
        self._agreed.add(kind)
        return True


assert dist.is_available(), "torch was built without torch.distributed"
