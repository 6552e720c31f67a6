"""The examples that stand in docstrings, which the API's pages show, run and print what stands below them."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import attention_engine

PACKAGE = Path(attention_engine.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name):
    module = importlib.import_module(f"attention_engine.{name}")
    known = {public: getattr(attention_engine, public) for public in attention_engine.__all__} | {"torch": torch}
    found = doctest.testmod(module, extraglobs={**known, **vars(attention_engine.library), **vars(module)})
    assert found.failed == 0 and found.attempted > 0


def test_every_module_with_an_example_is_run():
    assert {"flex.attention", "runtime.masks", "serving.varlen", "distributed.layout"} <= set(MODULES)


def test_everything_in_the_library_has_an_example():
    library = attention_engine.library
    own = {
        n: v
        for n, v in vars(library).items()
        if not n.startswith("_") and getattr(v, "__module__", None) == library.__name__
    }
    assert len(own) > 24
    for name, held in own.items():
        assert ">>> " in held.__doc__ or getattr(held, "_is_protocol", False), name
