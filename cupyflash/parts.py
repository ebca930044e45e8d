"""`attention_backward` where out and lse are not attention's own but, say, those of attention to more keys: what is
differentiated in its place.

Its derivatives are asked of q, k, v and what else attention takes, x, alone, of which out and lse are functions. With
o and l those of x itself, P = exp(z - lse) is s exp(z - l) for s = exp(l - lse), so that

    P (dP - dout·out + dlse) = exp(z - l) (s dP - s dout·o + s (dlse + dout·(o - out))):

these gradients are those of o and l for (s dout, s (dlse + dout·(o - out))).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .call import Arrays
from .namespaces import by_heads, cast, over_out
from .passes import BACKWARD, FORWARD, Pass


def gradients(xp: Any, run: Callable[[Pass, Arrays], Any], arrays: Arrays, layout: str) -> Any:
    """As `attention_backward` gives them, by `run` of passes on arrays that are attention's own."""
    x = {name: a for name, a in arrays.items() if name not in ("out", "lse", "dout", "dlse")}
    out, lse, dout, dlse = arrays["out"], arrays["lse"], arrays["dout"], arrays.get("dlse")
    own_out, own_lse = run(FORWARD, x)

    seen = own_lse != -math.inf  # (elsewhere 0 or infinity less infinity)
    share = xp.where(seen, xp.exp(xp.where(seen, own_lse - lse, 0)), 0)
    given, of_own, of_all = (cast(a, own_lse.dtype) for a in (dout, own_out, out))
    # Where both are 0, or nothing is seen, dout may hold anything.
    some = ((of_own != 0) | (of_all != 0)).any(-1)[..., None] & over_out(seen, layout)
    rows = by_heads((xp.where(some, given, 0) * (of_own - of_all)).sum(-1), layout)
    wide = xp.where(some | xp.isfinite(given), given, 0) * over_out(share, layout)
    by_results = {"dout": cast(wide, dout.dtype), "dlse": share * (rows if dlse is None else rows + dlse)}
    return run(BACKWARD, x | {"out": own_out, "lse": own_lse} | by_results)
