"""The ladder from the formula to the kernel: every algorithm as its paper has it, on NumPy or CuPy arrays, and counted.

Nothing here is fast: tiles are Python loops, so that each line of a paper is a line of code. `cupyflash.attention` is
the function to use; these are the functions to read. Inputs are finite, float32 or float64, all of one library and
dtype, and no dimension is empty.

Shapes: `standard_attention` and `flash2_*` take q (B, Sq, H, D), k (B, Sk, H, D) and v (B, Sk, H, Dv) like the rest of
the package. The other rungs are about one head and take q (Sq, D), k (Sk, D), v (Sk, Dv). The scale is 1/sqrt(D) unless
given.

With `trace=True` a function returns one more value: a `Trace` of the elements it moved and the operations it did. Given
a `Trace`, it works on that one: a subclass sees every tile that passes (docs/tutorial_plots.py draws its pictures so).

Papers
------
- Vaswani et al. 2017, Attention is all you need, https://arxiv.org/abs/1706.03762
- Milakov & Gimelshein 2018, Online normalizer calculation for softmax, https://arxiv.org/abs/1805.02867
- Rabe & Staats 2021, Self-attention does not need O(n²) memory, https://arxiv.org/abs/2112.05682
- Dao et al. 2022, FlashAttention, https://arxiv.org/abs/2205.14135
- Dao 2023, FlashAttention-2, https://arxiv.org/abs/2307.08691
- Dao et al. 2023, Flash-Decoding for long-context inference, https://pytorch.org/blog/flash-decoding/
"""

from .flash1 import block_sparse, flash1_backward, flash1_forward, tile_sizes
from .flash2 import flash2_backward, flash2_forward, split_kv
from .softmax import flash_one_pass, online_softmax, safe_softmax
from .standard import standard_attention, standard_attention_backward
from .trace import Trace

__all__ = [
    "Trace",
    "block_sparse",
    "flash1_backward",
    "flash1_forward",
    "flash2_backward",
    "flash2_forward",
    "flash_one_pass",
    "online_softmax",
    "safe_softmax",
    "split_kv",
    "standard_attention",
    "standard_attention_backward",
    "tile_sizes",
]
