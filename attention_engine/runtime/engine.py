"""What both engines share: what tracing found, the keys of what runs, and calls that need no check again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.arch import Arch, check_gpu, detect
from attention_engine.compiler import Kernel
from attention_engine.errors import FunctionsChanged, NoDevice, SizesUnknown, UnknownOption, as_given
from attention_engine.frontend.captured import Captured
from attention_engine.frontend.custom_io import CustomIO, CustomSpec
from attention_engine.frontend.frames import briefly
from attention_engine.frontend.meta import Heads, Meta
from attention_engine.frontend.signatures import Form
from attention_engine.ir.expr import Type
from attention_engine.runtime import op
from attention_engine.runtime.attentions import ATTENTIONS, Given
from attention_engine.runtime.begins_anew import BeginsAnew
from attention_engine.runtime.cached_again import SeenCaches
from attention_engine.runtime.captured import Axes, capturing, specs_of
from attention_engine.runtime.inputs import signature
from attention_engine.runtime.moved import Starts, moved
from attention_engine.runtime.program_kernels import Direct
from attention_engine.runtime.seen import Again, Seen
from attention_engine.runtime.tuning import Tuning

MOST_SEEN = 4096
# A traced program's nodes are one of a kind in a process.
OF_THIS_PROCESS = ("_first", "_keys", "_seen", "_again", "_cached", "_cached_seen", "_parted", "_looking", "_looks")


class Engine(BeginsAnew):
    """A user's functions, traced once a process, as a module that knows the calls it has seen.

    A call is made of tensors (`Given`), a form (all that the call says beside them, a value) and whether it returns
    more than the output. A variant is what a call says of the program: whether there are blocks, or decays.
    """

    of_this_process = OF_THIS_PROCESS
    qkv_meta: tuple[Meta, Meta, Meta] | None  # None: heads, dims and dtype are those of each call
    _called: tuple[Meta, Meta, Meta] | None = None  # those of the newest kind of call, where there are no metas
    _reads_numbers: bool = False  # did a function make a Python number of a captured tensor?
    custom_io: CustomIO
    layout: str
    device: Arch | None
    backend: str
    deterministic: bool
    tuning: Tuning
    _types: dict[str, Type]  # of custom inputs, as far as the constructor can know
    ORDINARY: ClassVar[Any]  # the variant that is traced where no call says more
    TURNED: ClassVar[int]  # so many of the first tensors of a call have a length and heads, in the order of the layout

    def __init_subclass__(cls, **named: Any) -> None:
        """Constructors' errors show the user's frames."""
        super().__init_subclass__(**named)
        if "__init__" in vars(cls):
            cls.__init__ = briefly(cls.__init__)  # type: ignore[method-assign]

    def _begin(self) -> None:
        """What a process finds out of an engine; nothing so far."""
        self._keys: dict[object, str] = {}
        self._seen: dict[object, Seen] = {}  # by the signatures of calls that passed every check
        self._again: Again | None = None  # the last of them
        self._cached: dict[object, Any] = {}  # what runs calls with caches, by backend, types, variant and axes
        self._cached_seen = SeenCaches()  # those calls
        self._first: tuple[Any, tuple[Captured, ...]] | None = None

    # ---- heads, dims and dtype

    def _metas(self) -> tuple[Meta, Meta, Meta]:
        """The metas, or what the newest kind of call was like. Raises SizesUnknown."""
        known = self.qkv_meta or self._called
        if known is None:
            raise SizesUnknown(
                "heads, dims and dtype are those of the first call, and there was none. Call the engine once, or give "
                f"metas: {type(self).__name__}((meta_tensor(batch, heads, length, dim),) * 3, ...)."
            )
        return known

    def _note_call(self, heads: tuple[Heads, Heads, Heads], dtype: torch.dtype) -> bool:
        """True. Where there are no metas, this call says what kernels are shown for, and compiled ahead."""
        if self.qkv_meta is None:
            q, k, v = (Meta(None, number, None, dim, dtype) for number, dim in heads)
            self._called = (q, k, v)
        return True

    _note_call._dynamo_marked_constant = True  # type: ignore[attr-defined] # as _key is

    def _note_asked(self, *tensors: Tensor) -> None:
        """The same of q, k and v that a report was asked of, laid out as in a call."""
        place = 1 if self.layout == "bhsd" and tensors[0].ndim == 4 else -2
        q, k, v = ((t.shape[place], t.shape[-1]) for t in tensors)
        self._note_call((q, k, v), tensors[0].dtype)

    # ---- what tracing found

    @property
    def _program(self) -> Any:
        return self._whole()[0]

    @property
    def _captured(self) -> tuple[Captured, ...]:
        """The tensors that the functions captured, in the order met."""
        if is_compiling() or self._first is None:  # a compiler that reads None here doesn't see what tracing puts there
            return self._whole()[1]
        return self._first[1]

    def _whole(self) -> tuple[Any, tuple[Captured, ...]]:
        """What tracing found."""
        self._has_traced()
        assert self._first is not None
        return self._first

    def _has_traced(self) -> bool:
        """True. A copy traces when first asked, as the objects that its functions read must be whole."""
        if self._first is None:
            self._first = self._traced(self._types, self.ORDINARY)
        return True

    _has_traced._dynamo_marked_constant = True  # type: ignore[attr-defined] # as _key is

    def _trace(self, types: Mapping[str, Type], variant: Any) -> Any:
        """The program of a kind of calls. Raises FunctionsChanged."""
        if self._first is not None:
            program, captured = self._first
            held = {c.name: c.dtype for c in captured}
            if self._traced({**self._types, **held}, self.ORDINARY)[0] != program:
                raise FunctionsChanged(
                    "the functions of this engine say something else than when it was built: a number, a flag or a "
                    "parametrization that they read has changed since. Build the engine anew after such a change.\n"
                    "  What changes often belongs into a tensor: a custom input, or a buffer that a function captures."
                )
        return self._traced(types, variant)[0]

    def _traced(self, types: Mapping[str, Type], variant: Any) -> tuple[Any, tuple[Captured, ...]]:
        with capturing(tuple(self._io(variant).specs), types) as capture:
            program = self._trace_functions(types, variant)
        self._reads_numbers |= capture.reads_numbers
        return replace(program, custom=(*program.custom, *capture.names)), tuple(capture.captured.values())

    def _trace_functions(self, types: Mapping[str, Type], variant: Any) -> Any:
        """The program of the user's functions, captured tensors left out."""
        raise NotImplementedError

    def _io(self, variant: Any) -> CustomIO:
        """The declared custom inputs, and what a variant adds."""
        return self.custom_io

    def _specs(self, variant: Any) -> list[CustomSpec]:
        """The same as kernels read them."""
        return list(self._io(variant).specs.values())

    # ---- the keys of what runs

    def _key(
        self, backend: str, types: tuple[tuple[str, Type], ...], variant: Any, axes: Axes, starts: Starts = None
    ) -> str:  # fmt: skip
        """The key of the attention that runs these calls; registered when first needed. axes: of captured tensors.
        starts: which indices start where a call says."""
        asked = (backend, types, variant, axes, starts)
        if asked not in self._keys:
            program = self._trace(dict(types), variant)
            specs = [*self._specs(variant), *specs_of(self._captured, axes)]
            program, specs = (program, specs) if starts is None else moved(program, specs, starts)
            device = self.device.name if self.device else ""
            inputs = [(s.name, s.axes) for s in specs]
            options = f"{backend} {device} {self._options(variant)} {inputs} {self.tuning}"
            key = program.fingerprint + hashlib.blake2b(options.encode(), digest_size=6).hexdigest()
            if key not in ATTENTIONS:
                self._register(key, program, specs, backend, variant)
            self._keys[asked] = key
        return self._keys[asked]

    # torch.compile asks for the key and looks no further; torch.compiler.assume_constant_result sets this too, after
    # a second's import of the compiler
    _key._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _options(self, variant: Any) -> str:
        """What of an engine and a variant changes kernels beside the program."""
        raise NotImplementedError

    def _register(self, key: str, program: Any, specs: Sequence[CustomSpec], backend: str, variant: Any) -> None:
        """Puts what runs under the key."""
        raise NotImplementedError

    # ---- calls that need no check again

    def _repeat(
        self, form: object, returns: bool, given: Given, present: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | None:
        """The results of a call that every check let pass before; None where it must be checked.

        given: as the caller gave it, with None for what is left out; present: without those.
        """
        again = self._again
        alike = again is not None and again.form == form and again.size == len(present) and again.fits(*present)
        if again is not None and alike and not op.watched():
            if self.layout == "bhsd":
                given = self._turned(given)
            wanted = again.requires_grad and torch.is_grad_enabled()
            return op.run_unwatched(again.key, returns, given, again.direct, wanted)
        asked = form, signature(*present)
        try:
            seen = self._seen.get(asked)
        except TypeError:  # a size that a compiler leaves open has no hash in PyTorch 2.11
            return None
        if seen is None or torch.is_autocast_enabled(seen.device):
            return None
        self._again = seen.again(form, *present) if seen.direct is not None and op.unwatched() else None
        return self._run(seen.key, form, returns, self._turned(given) if self.layout == "bhsd" else given, seen.direct)

    def _begin_backward(self, key: str, given: Given) -> None:
        """Starts compiling what the backward pass of a call will launch, while its forward pass is made and runs."""
        if not is_compiling() and op.follows(given) and op.unwatched():
            ATTENTIONS[ATTENTIONS[key].trained or key].begin_backward(given)

    def _remember(self, form: object, present: Sequence[Tensor], key: str, direct: Direct | None) -> None:
        """That every check let this call pass."""
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen[form, signature(*present)] = Seen(key, present[0].device.type, direct)

    def _turned(self, given: Given) -> Given:
        """Length and heads the other way round."""
        turned = [t if t is None else t.transpose(1, 2) for t in given[: self.TURNED]]
        return [*turned, *given[self.TURNED :]]

    def _run(self, key: str, form: object, returns: bool, given: Given, direct: Direct | None) -> tuple[Tensor, ...]:
        """The results of a call of tensors (batch, length, heads, ...). direct: the launch, where it is known."""
        return op.run(key, returns, given, direct)


def gpu_of(engine: Engine, device: Arch | None = None) -> Arch | None:
    """The GPU that is given, else the one that an engine compiles for, else this machine's, if there is one."""
    check_gpu(device)
    if (found := device or engine.device) is not None:
        return found
    return detect(torch.device("cuda")) if torch.cuda.is_available() else None


def gpu_to_compile_for(engine: Engine, device: Arch | None) -> Arch:
    """The GPU that is given, else the engine's, else this machine's. Raises NoDevice."""
    if (found := gpu_of(engine, device)) is None:
        raise _no_gpu(engine, "H100")
    return found


def _no_gpu(engine: Engine, which: str) -> NoDevice:
    return NoDevice(
        f"there is no GPU to compile for. Say which: {type(engine).__name__}(..., "
        f"device=attention_engine.arch.{which}())."
    )


def device_to_show(engine: Engine, form: str, device: Arch | None = None) -> Arch | None:
    """The GPU whose kernels are shown in a form: the one that is given, else the engine's, else this machine's; None:
    the interpreter's. Raises UnknownOption, NoDevice."""
    if form not in get_args(Form):
        raise UnknownOption(f'form is {as_given(form)}. Choose "tilelang", "cuda", "hip" or "cutedsl".')
    found = gpu_of(engine, device)
    if form == "tilelang":
        return found
    if found is None:
        raise _no_gpu(engine, "MI300X" if form == "hip" else "H100")
    if (found.language == "hip") is not (form == "hip"):
        raise UnknownOption(
            f'form is {as_given(form)}, and the GPU is {found.name}: "hip" is for AMD\'s, such as '
            'device=arch.MI300X(); "cuda" and "cutedsl" are for NVIDIA\'s.'
        )
    return found.in_straight_lines() if form == "cutedsl" else found


def kernel_of(kernels: Mapping[str, Kernel], name: str) -> Kernel:
    """The kernel of this name; UnknownOption where there is none."""
    if name not in kernels:
        raise UnknownOption(f"no kernel is called {as_given(name)}. Choose {', '.join(map(repr, kernels))}.")
    return kernels[name]
