"""Five mistakes, each on a line that says so, and right calls; a test has a type checker find the five and no other."""

from attention_engine import AttentionEngine, CustomInputs, CustomIO, LinearAttentionEngine, Symbol, library


def three(b: Symbol, q_idx: Symbol, kv_idx: Symbol) -> Symbol:
    return q_idx >= kv_idx


def four(b: Symbol, h: Symbol, q_idx: Symbol, kv_idx: Symbol) -> Symbol:
    return q_idx >= kv_idx


def five(b: Symbol, h: Symbol, q_idx: Symbol, kv_idx: Symbol, custom: CustomInputs) -> Symbol:
    return (q_idx >= kv_idx) & (custom["seen"] != 0)


AttentionEngine(layout="bhds")  # planted
AttentionEngine(backend="gpu")  # planted
AttentionEngine(mask_mod=three)  # planted
CustomIO({"slopes": ("head",)})  # planted
AttentionEngine(custom_io={"slopes": ("heads",)})  # planted

AttentionEngine(mask_mod=four, layout="bhsd", backend="tl")
AttentionEngine(None, CustomIO({"seen": ("seq_len_kv",), "x": (1, 4)}), None, five)
AttentionEngine(score_mod=lambda s, custom, b, h, i, j: s * custom["slopes"], mask_mod=lambda b, h, i, j: i >= j)
AttentionEngine(block_mask=library.causal, online_func=library.OnlineSigmoid(), mask_value="-inf")
AttentionEngine(score_mod=library.scale(0.5), mask_mod=library.and_masks(library.causal, library.sliding_window(4)))
LinearAttentionEngine(k_mod=lambda x, custom: x.sigmoid(), v_mod=lambda x: x * 2, layout="bhsd")
