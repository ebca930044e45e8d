"""`attention_vjp`: a forward, and the function that makes its gradients, where no autograd keeps what that needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .api import attention, attention_backward
from .gradients import Gradients
from .other_names import unexpected
from .rules import lasting
from .signature import A, Array, sharing

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .api import Shared


class Backward:
    """What `attention_vjp` returns beside out: called with the gradient of out, it returns those of q, k and v.

    It holds q, k, v, out and the options of its forward, and `lse`, as `attention(..., return_lse=True)` returns it.
    """

    def __init__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, options: Any) -> None:
        self.lse = lse
        self._arrays, self._options = (q, k, v, out, lse), options

    def __call__(
        self,
        dout: A,
        *,
        dlse: Array | None = None,
        wrt: str | Iterable[str] = (),
        grads: tuple[A, A, A] | None = None,
        add: bool = False,
    ) -> Gradients:
        """`attention_backward(dout, ...)` of this forward, with `dlse`, `wrt`, `grads` and `add` as there."""
        return attention_backward(dout, *self._arrays, dlse=dlse, wrt=wrt, grads=grads, add=add, **self._options)

    def __repr__(self) -> str:
        return f"<backward of an attention with {', '.join(self._options) or 'no options'}>"


@sharing(attention_backward, without=("dlse", "wrt", "grads", "add"))
def attention_vjp(q: A, k: A, v: A, **options: Unpack[Shared]) -> tuple[A, Backward]:
    """`attention`, and the function that makes its gradients (as jax.vjp of any function).

    Parameters
    ----------
    q, k, v, and all options : as given to `attention`

    Returns
    -------
    out : (B, Sq, Hq, Dv)
        As `attention` returns it.
    backward : function
        backward(dout) is `attention_backward(dout, ...)` of the same arrays and options: (dq, dk, dv). It takes dlse,
        wrt, grads and add as that does; `backward.lse` is the log-sum-exp. It holds the arrays, and copies none: they
        must not be written to before.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be. Nothing has been launched then.
    """
    known = inspect.signature(attention_vjp).parameters
    for name in options:
        if name not in known:
            raise unexpected("attention_vjp", name, known)
    given: Any = lasting(dict(options))
    out, lse = attention(q, k, v, return_lse=True, **given)
    return out, Backward(q, k, v, out, lse, given)
