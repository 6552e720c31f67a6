"""What TileLang is told of a kernel, and what is done to the text that it prints: names that a launch carries."""

DISABLE_WARP_SPECIALIZATION = "tl.disable_warp_specialized"
FAST_MATH = "tl.enable_fast_math"
NO_STORAGE_SYNC = "tl.disable_thread_storage_sync"  # kernels placed by hand have their own barriers
UNIFORM_GROUPS = "attention_engine.uniform_groups"  # ours, beside TileLang's: printed.with_uniform_groups
HELD_BARRIERS = "attention_engine.held_barriers"  # addresses of barriers stay in registers: printed.with_held_barriers
HELD_THREADS = "attention_engine.held_threads"  # so do threads' indices: printed.with_held_threads
STORED_MATRICES = "attention_engine.stored_matrices"  # tiles leave registers by stmatrix: matrices.py
ONE_CHAIN = "attention_engine.one_chain"  # rows are reduced in one chain, as TileLang prints it: not printed.in_chains
WHOLE_DESCRIPTORS = "attention_engine.whole_descriptors"  # of products, added to as 64 bits: descriptors.py
NO_CONTRACTION = "attention_engine.no_contraction"  # a product and a sum are rounded each: equal formulas, equal bits


def rules_of_forward(pairs_issue_much: bool, woven: bool) -> tuple[str, ...]:
    """What is done to the text of forward kernels placed by hand. Whole descriptors: on an H100 1 % faster where woven,
    at head dim 64; at 128 no faster."""
    return (UNIFORM_GROUPS, HELD_BARRIERS, *[ONE_CHAIN] * pairs_issue_much, *[WHOLE_DESCRIPTORS] * woven)
