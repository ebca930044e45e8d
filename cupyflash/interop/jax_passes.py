"""The passes of attention as primitives of JAX's, with their rules: how each is differentiated, and how it is mapped.

    attend(x) -> out, lse              jvp: push
    push(x, out, lse; u) -> J u        linear in u       transpose: pull      by x: second
    pull(x, out, lse; G) -> Jᵀ G       linear in G       transpose: push      by x: hess
    hess(x, out, lse, G; u, U)         H(G) u + Jᵀ U     transpose: hess along u, push along U
    second(x, out, lse, u; w)          what J u changes by along w. No kernel does it; its transpose, hess, needs it

x are q, k, v and what else a call takes, G = (dout, dlse). out and lse are functions of x: what they depend on is asked
of x alone. (Those that a user gives may be others': `parts`.) Arrays have names: the tangent of one has a "t" before
its name, and one of w "tt". Symbolic zeros stay what they are: an array that is not named is 0.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import jax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .. import folding, parts
from ..call import Arrays
from ..gradients import Gradients
from ..passes import BACKWARD, BACKWARD_JVP, BY_RESULTS, FORWARD, FORWARD_TWICE, JVP, TWICE, Pass
from ..problem import ARRAYS
from .jax_call import How, made, results_of

_ad: Any = ad
_KEPT, _G, _J = ("out", "lse"), ("dout", "dlse"), ("tout", "tlse")


def bind(of: Any, arrays: Arrays, how: How) -> list[Any]:
    """The results of a primitive."""
    found: list[Any] = of.bind(*alike(arrays.values()), names=tuple(arrays), how=how)
    return found


def gradients(found: Sequence[Any], wrt: tuple[str, ...]) -> Gradients:
    dq, dk, dv, *others = found
    return Gradients(dq, dk, dv, dict(zip(wrt, others)))


def _optional(arrays: Iterable[str], how: How) -> list[str]:
    """The optional arrays that have gradients, in the order of `check_wrt`."""
    score = how.option("score")
    of_score = [x.key for x in (score.arrays if score else ()) if x.kind == "float"]
    return [row.name for row in ARRAYS if row.gradient and row.name in arrays] + of_score


# ---- derivatives ----------------------------------------------------------------------------------------------------
# A jvp rule takes the arrays and the tangents of those that move, by their own names, and gives the results' (None:
# none).


def _attend_jvp(arrays: Arrays, moving: Arrays, how: How) -> tuple[list[Any], list[Any] | None]:
    found = bind(attend, arrays, how)
    u = _along(arrays, moving, how)
    return found, bind(push, arrays | dict(zip(_KEPT, found)) | u, how.but(JVP)) if moving else None


def _push_jvp(arrays: Arrays, moving: Arrays, how: How) -> tuple[list[Any], list[Any] | None]:
    found = bind(push, arrays, how)
    u = {name: x for name, x in moving.items() if name.startswith("t")}
    w = {f"t{name}": x for name, x in _along(arrays, moving, how).items()}
    if not how.own and not (u or w):
        raise NotImplementedError(BY_RESULTS)
    changes = [bind(push, _without_tangents(arrays) | u, how)] if u else []
    changes += [bind(second, arrays | dict(zip(_J, found)) | w, how)] if w else []
    return found, [sum(x[1:], x[0]) for x in zip(*changes)] or None


def _pull_jvp(arrays: Arrays, moving: Arrays, how: How) -> tuple[list[Any], list[Any] | None]:
    _check_rounded(how)
    found = bind(pull, arrays, how)
    if not how.own and any(name in moving for name in _KEPT):

        def pulled(moving: Arrays) -> list[Any]:
            return parts.gradients(jnp, functools.partial(_own, how=how), arrays | moving, how.option("layout"))

        return found, jax.jvp(pulled, ({name: arrays[name] for name in moving},), (moving,))[1]
    along = _along(arrays, moving, how) | {f"t{name}": moving[name] for name in _G if name in moving}
    return found, _moved(arrays, along, [moving.get(name) for name in _KEPT], how)


def _own(of: Pass, arrays: Arrays, how: How) -> list[Any]:
    """A pass where out and lse, if they are given, are attention's own."""
    how = how.but(of, how.wrt if of.of_gradients else ())._replace(own=True)
    return bind(PRIMITIVES[of], arrays, how)


def _hess_jvp(arrays: Arrays, moving: Arrays, how: How) -> tuple[list[Any], list[Any] | None]:
    """By what it is linear in."""
    along = {name: x for name, x in moving.items() if name.startswith("t") and name not in _J}
    if not moving.keys() <= {*along, *_J, *(_KEPT if how.own else ())}:
        raise NotImplementedError(TWICE)
    return bind(hess, arrays, how), _moved(_without_tangents(arrays), along, [moving.get(name) for name in _J], how)


def _second_jvp(arrays: Arrays, moving: Arrays, how: How) -> tuple[list[Any], list[Any] | None]:
    """By what it is linear in."""
    if not all(name.startswith("tt") for name in moving):
        raise NotImplementedError(TWICE)
    known = {name: x for name, x in arrays.items() if not name.startswith("tt")}
    return bind(second, arrays, how), bind(second, known | moving, how)


def _check_rounded(how: How) -> None:
    if how.option("out_dtype") is not None:
        raise NotImplementedError("gradients with out_dtype have no derivatives; leave it out")


def _along(arrays: Arrays, moving: Arrays, how: How) -> Arrays:
    """The tangents of x, as the passes call them."""
    return {f"t{name}": moving[name] for name in ("q", "k", "v", *_optional(arrays, how)) if name in moving}


def _without_tangents(arrays: Arrays, but: tuple[str, ...] = ()) -> Arrays:
    """Those that are no tangents."""
    return {name: x for name, x in arrays.items() if not name.startswith("t") and name not in but}


def _moved(arrays: Arrays, along: Arrays, j: Sequence[Any], how: How) -> list[Any] | None:
    """What gradients change by along tangents of x and of G. `j`: J u, where it is known already."""
    of_g = {f"t{name}" for name in _G}
    u = {name: x for name, x in along.items() if name not in of_g}
    inputs = _without_tangents(arrays, _G)
    if not u:
        g = {name: along[f"t{name}"] for name in _G if f"t{name}" in along}
        return bind(pull, inputs | _whole(g, inputs), how.but(BACKWARD, how.wrt)) if g else None
    if any(x is None for x in j):
        j = bind(push, inputs | u, how.but(JVP))
    return bind(hess, arrays | along | dict(zip(_J, j)), how.but(BACKWARD_JVP, how.wrt))


def _whole(g: Arrays, inputs: Arrays) -> Arrays:
    """G with a dout, which the passes ask for."""
    return g if "dout" in g else g | {"dout": jnp.zeros_like(inputs["out"])}


# A transpose takes the arrays that are known, the cotangents of the results that have one, and the names of those that
# are wanted; it gives these, or fewer, or more.


def _push_transpose(arrays: Arrays, given: Arrays, wanted: Sequence[str], how: How) -> Arrays:
    inputs = _without_tangents(arrays)
    wrt = tuple(name for name in _optional(inputs, how) if f"t{name}" in wanted)
    found = gradients(bind(pull, inputs | _whole(given, inputs), how.but(BACKWARD, wrt)), wrt)
    return {name: found.of_call(name[1:]) for name in wanted}


def _pull_transpose(arrays: Arrays, given: Arrays, wanted: Sequence[str], how: How) -> Arrays:
    _check_rounded(how)
    return dict(zip(_G, bind(push, _without_tangents(arrays, _G) | given, how.but(JVP))))


def _hess_transpose(arrays: Arrays, given: Arrays, wanted: Sequence[str], how: How) -> Arrays:
    known = _without_tangents(arrays)
    j = bind(push, _without_tangents(arrays, _G) | given, how.but(JVP))
    results = {f"t{name}": x for name, x in zip(_G, j)}
    by_u = [name for name in wanted if name not in results and name not in _J]  # J u is a function of u
    if by_u:
        wrt = tuple(name for name in _optional(known, how) if f"t{name}" in by_u)
        found = gradients(bind(hess, known | given | dict(zip(_J, j)), how.but(BACKWARD_JVP, wrt)), wrt)
        results |= {name: found.of_call(name[1:]) for name in by_u}
    return results


def _second_transpose(arrays: Arrays, given: Arrays, wanted: Sequence[str], how: How) -> Arrays:
    wrt = tuple(name for name in _optional(arrays, how) if f"tt{name}" in wanted)
    known = {name: x for name, x in arrays.items() if not name.startswith("tt")}
    found = gradients(bind(hess, known | _whole(given, arrays), how.but(BACKWARD_JVP, wrt)), wrt)
    return {name: found.of_call(name[2:]) for name in wanted}


# ---- the same for each: types, batches, kernels ----------------------------------------------------------------------


def _types(*avals: Any, names: tuple[str, ...], how: How) -> list[Any]:
    """Those of the results, once the call is checked."""
    return [_like(avals[0], x.shape, x.dtype) for x in results_of(how, dict(zip(names, avals)))]


def _like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """One that varies along the axes of a mesh, inside shard_map, along which `aval` does."""
    spread = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=spread)


def _mapped(of: Any, args: Sequence[Any], dims: Sequence[Any], *, names: tuple[str, ...], how: How) -> Any:
    arrays = {name: x if d is None else jnp.moveaxis(x, d, 0) for name, x, d in zip(names, args, dims)}
    has = [name for name, d in zip(names, dims) if d is not None]

    def run(arrays: Arrays, options: dict[str, Any], wrt: tuple[str, ...] = ()) -> Any:
        return bind(of, arrays, how._replace(options=tuple(options.items()), wrt=wrt))

    call = (jnp, run, arrays, has, arrays[has[0]].shape[0], dict(how.options))
    if how.of.of_gradients:
        found: Any = (folding.backward if how.of is BACKWARD else folding.backward_jvp)(*call, how.wrt)
    else:
        found = (folding.forward if how.of is FORWARD else folding.jvp)(*call)
    return found, [0] * len(found)


def _of_kernels(how: How) -> How:
    """The same for all whose kernels are the same."""
    return how._replace(own=True)


def _run(*args: Any, names: tuple[str, ...], how: How) -> Any:
    # Of rows that see nothing lse is -inf, which nobody may have asked for.
    quiet = how.of is FORWARD and cast(Any, jax.config).jax_debug_infs
    with jax.debug_infs(False) if quiet else nullcontext():
        return made(_of_kernels(how))(dict(zip(names, args)))


def _lowered(ctx: Any, *args: Any, names: tuple[str, ...], how: How) -> Any:
    if getattr(ctx.module_context.lowering_parameters, "for_export", False):
        raise NotImplementedError(
            "attention is a callback into this process, and jax.export cannot write that down: export a function that "
            "calls jax.nn.dot_product_attention in its place"
        )
    return mlir.lower_fun(lambda *xs: made(_of_kernels(how))(dict(zip(names, xs))), multiple_results=True)(ctx, *args)


def _types_of_second(*avals: Any, names: tuple[str, ...], how: How) -> list[Any]:
    named = dict(zip(names, avals))
    return [named[name] for name in _KEPT]


def _no_kernel(*args: Any, **params: Any) -> Any:
    raise NotImplementedError(FORWARD_TWICE)


def _by_name(rule: Callable[[Arrays, Arrays, How], tuple[list[Any], list[Any] | None]]) -> Callable[..., Any]:
    """A jvp rule as JAX calls it."""

    def jvp(primals: Any, tangents: Any, *, names: tuple[str, ...], how: How) -> Any:
        moving = {name: x for name, x in zip(names, tangents) if type(x) is not _ad.Zero}
        found, changes = rule(dict(zip(names, primals)), moving, how)
        return found, [
            _ad.Zero(cast(Any, jax.typeof(x)).to_tangent_aval()) for x in found
        ] if changes is None else changes

    return jvp


def _transposed(rule: Callable[[Arrays, Arrays, Sequence[str], How], Arrays]) -> Callable[..., Any]:
    """A transpose as JAX calls it."""

    def transpose(cotangents: Any, *args: Any, names: tuple[str, ...], how: How) -> Any:
        of = _G if how.of is JVP else [f"t{name}" for name in ("q", "k", "v", *how.wrt)]
        given = {name: x for name, x in zip(of, cotangents) if type(x) is not _ad.Zero}
        kinds = {name: x.aval for name, x in zip(names, args) if _ad.is_undefined_primal(x)}
        wanted = list(kinds)
        known = {name: x for name, x in zip(names, args) if not _ad.is_undefined_primal(x)}
        found = rule(known, given, wanted, how) if given else {}
        return [_shared_out(found[name], kinds[name]) if name in wanted and name in found else None for name in names]

    return transpose


def _primitive(
    name: str, jvp: Any, transpose: Any = None, types: Any = _types, run: Any = _run, lowered: Any = _lowered
) -> Any:
    of: Any = Primitive(f"cupyflash_{name}")
    of.multiple_results = True
    of.def_impl(run)
    of.def_abstract_eval(types)
    mlir.register_lowering(of, lowered)
    batching.primitive_batchers[of] = functools.partial(_mapped, of)
    _ad.primitive_jvps[of] = _by_name(jvp)
    if transpose is not None:
        _ad.primitive_transposes[of] = _transposed(transpose)
    return of


attend = _primitive("attend", _attend_jvp)
push = _primitive("push", _push_jvp, _push_transpose)
pull = _primitive("pull", _pull_jvp, _pull_transpose)
hess = _primitive("hess", _hess_jvp, _hess_transpose)
second = _primitive("second", _second_jvp, _second_transpose, _types_of_second, _no_kernel, _no_kernel)
PRIMITIVES: dict[Pass, Any] = {FORWARD: attend, JVP: push, BACKWARD: pull, BACKWARD_JVP: hess}


# ---- axes of a mesh, inside shard_map --------------------------------------------------------------------------------


def _shared_out(x: Any, like: Any) -> Any:
    """An array that lies on the devices of a mesh with explicit axes as one of this type does."""
    sharding, own = like.sharding, cast(Any, jax.typeof(x)).sharding
    if sharding == own or not getattr(sharding.mesh, "explicit_axes", ()):
        return x
    # (Its place before JAX 0.7.)
    home: Any = jax.sharding if hasattr(jax.sharding, "reshard") else importlib.import_module("jax.experimental.shard")
    return home.reshard(x, sharding)


def alike(arrays: Iterable[Any]) -> list[Any]:
    """The arrays as such that differ along the same axes; where one does not, its gradients are summed over them."""
    arrays = list(arrays)
    axes = frozenset[str]().union(*map(_axes, arrays))
    missing = [(x, tuple(axes - _axes(x))) for x in arrays] if axes else []
    return [_cast(x, more) if more else x for x, more in missing] or arrays


def _axes(x: Any) -> frozenset[str]:
    """Those along which an array may differ."""
    kind: Any = jax.typeof(x)
    found: frozenset[str] = kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())
    return found


def _cast(x: jax.Array, axes: tuple[str, ...]) -> Any:
    lax: Any = jax.lax
    return lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)  # its name before
