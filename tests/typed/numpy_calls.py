"""What a type checker makes of calls on NumPy arrays; never run. An `ignore` that nothing needs is an error, too."""

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import cupyflash
from cupyflash.tools.autotune import Tuning
from cupyflash.tools.explanation import Explanation

Floats = npt.NDArray[np.float32]


def right(q: Floats, rows: npt.NDArray[np.float64], seen: npt.NDArray[np.bool_], either: bool) -> None:
    assert_type(cupyflash.attention(q, q, q, causal="top_left", window=(3, None), key_mask=seen, out=q), Floats)
    out, lse = cupyflash.attention(q, q, q, scale=0.5, bias=q, return_lse=True)
    assert_type(out, Floats)
    one_or_two = cupyflash.attention(q, q, q, return_lse=either)
    if isinstance(one_or_two, tuple):
        assert_type(one_or_two[0], Floats)
    grads = cupyflash.attention_backward(out, q, q, q, out, lse, dlse=rows, causal=True, grads=(q, q, q))
    dq, dk, dv = grads
    print(grads.dq + dq, dk, dv)
    tout, tlse = cupyflash.attention_jvp({"q": q, "sinks": rows}, q, q, q, out, lse, causal=True, tout=q)
    assert_type(tout, Floats)
    hessian = cupyflash.attention_backward_jvp({"dlse": rows}, q, q, q, q, out, lse, jvp=(tout, tlse), wrt=("bias",))
    print(hessian.dq, hessian.dbias)
    merged, norm = cupyflash.merge([out, out], (rows, rows))
    assert_type(merged, Floats)
    assert_type(norm, npt.NDArray[np.float64])
    assert_type(cupyflash.explain((1, 8, 1, 8), dtype="bf16", arch="sm_90a"), Explanation)
    assert_type(cupyflash.tune(q), Tuning)


def wrong(q: Floats) -> None:
    cupyflash.attention(q, q, [1.0])  # type: ignore[call-overload]
    cupyflash.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    cupyflash.attention(q, q, q, causal=0.5)  # type: ignore[call-overload]
    cupyflash.attention(q, q, q, key_mask=[True])  # type: ignore[call-overload]
    cupyflash.attention_backward(q, q, q, q, q)  # type: ignore[call-arg]
    cupyflash.attention_backward(q, q, q, q, q, q, is_causal=True)  # type: ignore[arg-type]
    cupyflash.attention_jvp({"q": [1.0]}, q, q, q, q, q)  # type: ignore[dict-item]
    cupyflash.attention_jvp({"q": q}, q, q, q, q, q, is_causal=True)  # type: ignore[call-arg]
    cupyflash.merge([[1.0]], [q])  # type: ignore[type-var]
