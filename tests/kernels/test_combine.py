"""How a kernel joins parts of rows."""

import pytest

from attention_engine.ir.expr import Op, topological
from attention_engine.kernels.cached.combine import in_exp2
from attention_engine.passes.derive_merge import derive_merge
from tests.merges import RIGHT


@pytest.mark.parametrize("name", RIGHT)
def test_an_exponent_takes_its_difference_before_its_factor(name):
    """nvcc fuses a * c - b * c, and of a = b = -1e30, the maximum of a part without keys, that is no 0 but 1e22."""
    merge = derive_merge(RIGHT[name].trace())
    roots = in_exp2(*(expr for _, expr in merge.states), merge.factor)
    exponents = [node.args[0] for node in topological(*roots) if node.op is Op.EXP2]
    assert not any(exponent.op is Op.ADD for exponent in exponents)
    assert exponents or not any(node.op is Op.EXP for node in topological(*(e for _, e in merge.states), merge.factor))
