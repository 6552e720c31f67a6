"""Serves requests with a Hugging Face model whose attention is an engine: prompts packed, then one token at a time from
pages, in batches that requests join and leave. Beside it transformers' own generate, which must say the same.

The model is a small Llama with random weights, so that nothing is downloaded.

    python attn_script/generate.py [--device cuda] [--requests 64] [--slots 32] [--page 64]
"""

import argparse
from copy import deepcopy

import torch
from _serve import Server, by_transformers, draw_requests, largest_gap, make_model, timed
from transformers import AttentionInterface

from attention_engine import AttentionEngine, library

# layers, heads, key heads, head dim, inner width, vocabulary; then NAMES: longest is a prompt's, most of new tokens
NAMES = ("requests", "slots", "longest", "most", "page")
SIZES = {
    "cpu": ((2, 4, 2, 16, 128, 256), (10, 4, 40, 16, 16)),
    "cuda": ((16, 32, 8, 64, 8192, 32000), (64, 32, 2048, 128, 64)),
}
ENGINE = AttentionEngine(mask_mod=library.causal)  # any other score, mask or row function serves as well


def attention(module, query, key, value, attention_mask, pages, **_):
    """What transformers calls in each layer: tensors are (1, heads, rows, dim), rows those of all requests."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    pages.write(module.layer_idx, k, v)
    if pages.starts is not None:
        return ENGINE(q, k, v, cu_seqlens_q=pages.starts)[None], None
    keys, values = pages.keys[module.layer_idx], pages.values[module.layer_idx]
    o = ENGINE.with_cache(q[:, None], keys, values, kv_lengths=pages.lengths, page_table=pages.table)
    return o.transpose(0, 1), None


AttentionInterface.register("from_pages", attention)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    for name in NAMES:
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args(argv)
    sizes, usual = SIZES[args.device]
    count, slots, longest, most, page = (getattr(args, name) or n for name, n in zip(NAMES, usual, strict=True))
    model, requests = make_model(args.device, sizes), draw_requests(count, longest, most, sizes[-1], slots)
    device, tokens = model.device, sum(r.wanted for r in requests)
    model.set_attn_implementation("from_pages")
    server = Server(model, slots, longest + most + 1, page)
    server.serve(deepcopy(requests[:slots]))  # kernels are compiled
    (at_once, pages), seconds = timed(lambda: server.serve(requests), device)
    print(f"{count} requests, {tokens} tokens, {at_once} at once, {pages} pages of {page}: {tokens / seconds:.0f}/s")
    said, gaps = {"this script": [r.said for r in requests]}, {}
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        said[name], seconds = timed(lambda: by_transformers(model, requests, slots), device)
        same = sum(a == b for a, b in zip(said[name], said["this script"], strict=True))
        print(f"transformers, {name}: {tokens / seconds:.0f}/s; {same} of {count} requests got the same tokens")
    for name, found in said.items():  # where tokens differ: sdpa's logits of what was said, the best and the chosen one
        gaps[name] = largest_gap(model, requests, found)
        print(f"tokens of {name} lie at most {gaps[name]:.2g} below the best logit")
    return said, gaps, requests, server.pages


if __name__ == "__main__":
    main()
