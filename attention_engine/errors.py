"""Every mistake a user can make, one class each: what was found, what was expected, the way out."""

from __future__ import annotations


class AttentionEngineError(Exception):
    """The base of every error that this package raises on purpose."""


class BranchOnSymbol(AttentionEngineError, TypeError):
    """Python asked for the truth of a symbolic value."""


class UnsupportedOperation(AttentionEngineError, TypeError):
    """A mod used something that has no meaning on symbols."""


class WrongArity(AttentionEngineError, TypeError):
    """A mod or a method takes the wrong number of arguments."""


class WrongResult(AttentionEngineError, TypeError):
    """A mod or a method returned something else than it should."""


class UnknownState(AttentionEngineError, KeyError):
    """A row state or a returned row that was not declared, or one that is missing."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownCustomInput(AttentionEngineError, KeyError):
    """A custom input that CustomIO doesn't declare."""

    def __str__(self) -> str:
        return str(self.args[0])


class BadCustomInput(AttentionEngineError, ValueError):
    """A custom input whose declaration, use or tensor doesn't fit."""


class BadInitialValue(AttentionEngineError, ValueError):
    """A row state that doesn't start at a number."""


class NotOnline(AttentionEngineError, ValueError):
    """A program whose result depends on how a row is cut into tiles."""


class BackwardNotDerived(AttentionEngineError, NotImplementedError):
    """A program whose gradient the compiler can't derive."""


class RowNotDifferentiable(AttentionEngineError, NotImplementedError):
    """A gradient arrived at a returned row that has none."""


class BadMeta(AttentionEngineError, ValueError):
    """The three meta tensors don't describe an attention."""


class HeadsDoNotGroup(AttentionEngineError, ValueError):
    """Query heads that can't share the key heads evenly."""


class BadInput(AttentionEngineError, ValueError):
    """A tensor of a call doesn't fit the engine: shape, dtype, device or number."""


class UnknownOption(AttentionEngineError, ValueError):
    """An option has a value that means nothing."""


class NotYetSupported(AttentionEngineError, NotImplementedError):
    """Something the design has and this version doesn't."""


class NoDevice(AttentionEngineError, RuntimeError):
    """A backend was asked for where it can't run."""


class TileDoesNotFit(AttentionEngineError, ValueError):
    """No tile of this problem fits the GPU."""


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


class UnknownArch(AttentionEngineError, ValueError):
    """A GPU that this package has no description of."""
