"""Mamba-2 as models use it, with one B (k) and C (q) for all heads: their gradients are summed over the heads.

python attn_script/mamba2_ngroup1.py [--length N] [--backend interpret]
"""

from dataclasses import replace

import mamba2

SIZES = replace(mamba2.SIZES, q_heads=1, k_heads=1)


def main(argv=None):
    return mamba2.main(argv, SIZES)


if __name__ == "__main__":
    main()
