"""Every mistake a user can make, one class each: what was found, what was expected, the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self

PAGE = "docs/errors.md"  # of the repository


class AttentionEngineError(Exception):
    """The base of every error that this package raises. Its last line names its section of docs/errors.md.

    blamed: the expressions that are of another type than belongs there, where that is the mistake.
    """

    blamed: tuple[object, ...] = ()

    def blaming(self, *expressions: object) -> Self:
        """The error, of these expressions."""
        self.blamed = expressions
        return self

    @property  # no __init__: torch.compile follows none of an exception
    def __notes__(self) -> list[str]:  # type: ignore[override] # add_note appends to what it finds
        notes: list[str] = self.__dict__.setdefault("notes", [f"  See {section_of(type(self))}."])
        return notes


def section_of(kind: type[AttentionEngineError]) -> str:
    """Where PAGE tells of a class of errors."""
    return f"{PAGE}#{kind.__name__.lower()}"


def nearest(name: object, known: Iterable[str], most: int = 3) -> list[str]:
    """Those of the known names that are written most like this one, none where none is like it."""
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=most, cutoff=0.6)
    return [by_lower[f] for f in found]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The question whether one of the nearest names was meant, behind a space; "" where none is near."""
    shown = [repr(n) for n in nearest(name, known)]
    return f" Did you mean {' or '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))}?" if shown else ""


def as_given(value: object) -> str:
    """A value as messages show what was found: one line of its repr, at most 80 characters; a tensor by its shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    line, *more = repr(value).splitlines()
    return f"{line[:77]}..." if more or len(line) > 80 else line


def message_of(error: AttentionEngineError) -> str:
    """The error as a traceback ends with it: its class, what it says, and its notes."""
    return "\n".join([f"{type(error).__name__}: {error}", *error.__notes__])


class NotAFunction(AttentionEngineError, TypeError):
    """A score_mod or mask_mod that can't be called."""


class BranchOnSymbol(AttentionEngineError, TypeError):
    """Python asked for the truth of a symbolic value."""


class UnsupportedOperation(AttentionEngineError, TypeError):
    """A mod used something that has no meaning on symbols."""


class UnknownReduction(UnsupportedOperation):
    """get_reduce was asked for what it can't do."""


class NumberTooLarge(UnsupportedOperation):
    """An integer of more than 64 bits, which torch has no room for either."""


class MisplacedReduction(UnsupportedOperation):
    """get_reduce where no tile of a row is: anywhere but in online_fwd."""


class SymbolAsIndex(UnsupportedOperation):
    """Python or torch was asked to count or to index by a symbol."""


class TensorInMod(UnsupportedOperation):
    """A mod mixed a tensor, an array or another object with symbols."""


class WrongArity(AttentionEngineError, TypeError):
    """A mod or a method takes the wrong number of arguments."""


class FactoryNotCalled(WrongArity):
    """A function that makes mods was given where a mod belongs."""


class WrongResult(AttentionEngineError, TypeError):
    """A mod or a method returned something else than it should."""


class MaskIsNoCondition(WrongResult):
    """A mask_mod returned something that is neither true nor false."""


class NotReduced(WrongResult):
    """A row state, a rescale or a returned row that still differs from key to key."""


class UnknownState(AttentionEngineError, KeyError):
    """A row state or a returned row that was not declared, or one that is missing."""

    def __str__(self) -> str:
        return str(self.args[0])


class MissingState(UnknownState):
    """A declared row state or row that a method didn't return."""


class UnknownCustomInput(AttentionEngineError, KeyError):
    """A custom input that CustomIO doesn't declare."""

    def __str__(self) -> str:
        return str(self.args[0])


class BadCustomInput(AttentionEngineError, ValueError):
    """A custom input whose declaration, use or tensor doesn't fit."""


class UnknownAxis(BadCustomInput):
    """A custom input declared with an axis that nothing runs over."""


class WrongIndex(BadCustomInput):
    """A custom input read with the wrong number of indices, or with none where one is needed."""


class BadInitialValue(AttentionEngineError, ValueError):
    """A row state that doesn't start at a number."""


class StatesNotDeclared(AttentionEngineError, TypeError):
    """An OnlineFunc whose __init__ doesn't call the base class."""


class NotOnline(AttentionEngineError, ValueError):
    """A program whose result depends on how a row is cut into tiles."""


class NoMerge(AttentionEngineError, NotImplementedError):
    """A program for which no formula was found that joins the parts of a row, or whose `combine` is wrong."""


class BackwardNotDerived(AttentionEngineError, NotImplementedError):
    """A program whose gradient the compiler can't derive."""


class RowNotDifferentiable(AttentionEngineError, NotImplementedError):
    """A gradient arrived at a returned row that has none."""


class BadMeta(AttentionEngineError, ValueError):
    """The three meta tensors don't describe an attention."""


class HeadDimsDiffer(BadMeta):
    """q and k of different head dims."""


class HeadsDoNotGroup(AttentionEngineError, ValueError):
    """Query heads that can't share the key heads evenly."""


class SizesUnknown(BadMeta):
    """An engine without metas was asked for what needs heads, dims and a dtype, before any call told them."""


class BadInput(AttentionEngineError, ValueError):
    """A tensor of a call doesn't fit the engine: shape, dtype, device or number."""


class NotATensor(BadInput):
    """Something else than a tensor was given in a call."""


class WrongRank(BadInput):
    """q, k or v with another number of dimensions than four."""


class WrongShape(BadInput):
    """A decay or a state of another shape than q, k and v ask for."""


class WrongHeads(BadInput):
    """Heads or head dims that aren't those the engine was built for, often the other layout."""


class LengthsDiffer(BadInput):
    """Batches or lengths of q, k and v that don't fit each other."""


class WrongSequences(BadInput):
    """cu_seqlens that don't say where packed sequences begin."""


class TooLong(BadInput):
    """More queries, keys or tokens than kernels count."""


class DtypesDiffer(BadInput):
    """q, k and v of more than one dtype."""


class NotFloating(BadInput):
    """q, k and v that hold integers or bools."""


class WrongDtype(BadInput):
    """Tensors of another dtype than the kernels were built for."""


class DevicesDiffer(BadInput):
    """Tensors of one call on more than one device."""


class CustomInputMissing(BadInput):
    """A declared custom input that a call didn't bring, or one too many."""


class WrongCustomDtype(BadInput):
    """A custom input of a dtype that kernels don't read."""


class WrongCustomShape(BadInput):
    """A custom input whose shape isn't what its axes ask for."""


class WrongBlockMask(BadInput):
    """A block mask whose shape or dtype isn't that of the blocks."""


class WrongCache(BadInput):
    """A cache, its lengths or its pages that don't fit the queries or the engine."""


class CacheNotDifferentiable(AttentionEngineError, NotImplementedError):
    """A gradient was asked for through attention to a cache."""


class UnknownProgram(AttentionEngineError, RuntimeError):
    """A graph calls an attention that this process hasn't built."""


class FunctionsChanged(AttentionEngineError, RuntimeError):
    """An engine's functions read a number or a flag that has changed since the engine was built."""


class UnknownOption(AttentionEngineError, ValueError):
    """An option has a value that means nothing."""


class UnknownArgument(AttentionEngineError, TypeError):
    """An argument was given by a name that means nothing here."""


class OptionsClash(UnknownOption):
    """Two options that say the same thing, or against each other."""


class NotYetSupported(AttentionEngineError, NotImplementedError):
    """Something the design has and this version doesn't."""


class AttentionOutOfReach(AttentionEngineError, NotImplementedError):
    """A Hugging Face model computes its attention in code of its own, which no registered attention replaces."""

    def __init__(self, model: str | None) -> None:
        super().__init__(
            f"the attention of this model ({model or 'of an unknown type'}) is code of its own, which adds the mask to "
            "its scores. transformers puts no other in its place.\n"
            '  Use attn_implementation="eager", or a model of another family (docs/transformers.md says which).'
        )


class NoDevice(AttentionEngineError, RuntimeError):
    """A backend was asked for where it can't run."""


class TileDoesNotFit(AttentionEngineError, ValueError):
    """No tile of this problem fits the GPU."""

    def __init__(self, dim: int, dim_v: int, dtype: str, why: str) -> None:
        smaller = "smaller head dims" if dtype != "float32" else "smaller head dims or a 16-bit dtype"
        super().__init__(
            f'head dims {dim} and {dim_v} in {dtype} {why}.\n  Choose {smaller}; backend="reference" runs any.'
        )


class NotInterpretable(AttentionEngineError, NotImplementedError):
    """A tile program uses something that the interpreter has no meaning for."""

    def __init__(self, what: str, advice: str = "Write the kernel without it, or run it on a GPU.") -> None:
        super().__init__(f"The interpreter has no meaning for {what}. {advice}")


class HazardInKernel(AttentionEngineError, RuntimeError):
    """A kernel's asynchronous parts depend on each other in a way that the hardware does not promise."""

    def __init__(self, what: str) -> None:
        super().__init__(f"The kernel has a hazard: {what}. This is a defect of the kernel, not of its inputs.")


class NoCudaCompiler(AttentionEngineError, RuntimeError):
    """A kernel for a GPU was asked for where there is no nvcc."""

    def __init__(self) -> None:
        super().__init__(
            "No CUDA compiler (nvcc) found. Install the CUDA toolkit and set CUDA_HOME or PATH, "
            "or install it as wheels: pip install 'tilelang[nvcc]'."
        )


class NoHostCompiler(AttentionEngineError, RuntimeError):
    """A kernel for a GPU was asked for where nvcc finds no C++ compiler to work with."""

    def __init__(self) -> None:
        super().__init__("nvcc finds no C++ compiler: set CXX or install g++ (Debian and Ubuntu: apt-get install g++).")


class NoHipCompiler(AttentionEngineError, RuntimeError):
    """A kernel was to run on an AMD GPU where there is no ROCm."""

    def __init__(self, gpu: str) -> None:
        super().__init__(
            f"No HIP compiler (hipcc) found, so nothing can be compiled for {gpu}. Kernels for AMD's GPUs are lowered "
            "to HIP text, which source(..., form='hip') shows; nobody has run one.\n  Install ROCm with hipcc on PATH, "
            "and PyTorch for ROCm, or use backend='reference'."
        )


class NotLowered(AttentionEngineError, RuntimeError):
    """TileLang can't make text of a kernel in another language than CUDA."""

    def __init__(self, language: str, gpu: str, reason: str) -> None:
        super().__init__(
            f"TileLang can't lower this kernel to {language} for {gpu}: {reason}\n  docs/limits.md says which kernels "
            "it lowers. form='cuda' shows the kernel that runs on NVIDIA's GPUs."
        )
        self.reason = reason


class UnknownArch(AttentionEngineError, ValueError):
    """A GPU that this package has no description of."""


class TuneFileUnreadable(AttentionEngineError, ValueError):
    """A tune file that is damaged, of something else, or of another version."""


class TuneFileUnwritable(AttentionEngineError, RuntimeError):
    """A tune file that can't be written: no right to, no room, no such folder."""


class NothingRan(AttentionEngineError, RuntimeError):
    """Tuning tried tiles, and none of them ran and gave right numbers."""


class NotWhileCapturing(AttentionEngineError, RuntimeError):
    """Tuning was needed inside the capture of a CUDA graph."""


class BadScript(AttentionEngineError, ValueError):
    """A file that was named on the command line has no attention as named."""


class KernelsNotBuilt(AttentionEngineError, RuntimeError):
    """A wheel of kernels can't be made: some of them were not compiled, or not kept."""


class RanksDisagree(AttentionEngineError, RuntimeError):
    """Ranks that share a sequence call for different attentions, or bring parts that don't fit together."""


class HeadsDoNotDivide(AttentionEngineError, ValueError):
    """Query heads that can't be shared evenly among ranks."""


class LengthNotInLayout(AttentionEngineError, ValueError):
    """A tensor isn't this rank's part of a sequence of any length that the ranks were told, or of too short a one."""


class WrongPlacement(BadInput):
    """A DTensor is sharded as no rank could attend alone: over tokens, over a head's entries, or unevenly."""
