"""Runs kernels on CPU tensors, tile by tile: what a kernel means, without a GPU and without a compiler."""

from attention_engine.codegen.interpreter.statements import Interpreter

__all__ = ["Interpreter"]
