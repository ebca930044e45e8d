"""`struct Params`: which fields a kernel gets, and that what the host packs is what a compiler reads. No GPU needed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kernel_cover import FEATURES, GIVEN, KEY_MASK, problem

from cupyflash.gpu import params
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES, KernelPlan, plan
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from cupyflash.problem import ARRAYS, AXES, SCORE_ARRAYS, AttentionProblem, Given
from cupyflash.score.trace import trace

OF_ALL = [rule for rule in ARRAYS if not (rule.of_float8 or rule.ragged or rule.placed)]  # those of every dtype
H200 = Arch.of("sm_90a")
PLANS = [
    pytest.param(family, dtype, of, id=f"{family}-{dtype}-{of}")
    for family, room in FAMILIES.items()
    for dtype in ("float16", "float32", "float64")
    for of in (FORWARD, BACKWARD)
    if room.objection(problem(dtype), H200, of) is None
]
everywhere = pytest.mark.parametrize(("family", "dtype", "of"), PLANS)


def asked(dtype: str, family: str = "") -> AttentionProblem:
    """A problem with every number different, and all that the family takes."""
    scores = {"given": KEY_MASK} if family == "flash1" else {"given": GIVEN, "softcap": 20.0, "dropout": 0.25}
    return problem(
        dtype, 64, 96, batch=3, heads_q=10, heads_k=5, seq_q=700, seq_k=800, diagonal=-7, left=17, right=18, scale=-0.3,
        **scores,
    )  # fmt: skip


def packed(packer: params.Packer, addresses: Sequence[int] | None = None) -> bytes:
    """Params with these pointers, or null ones."""
    memory = packer.memory()
    packer.fill(memory, addresses or [0] * len(packer.slots))
    return bytes(memory)


def declared(kernel_plan: KernelPlan) -> list[tuple[str, str]]:
    """(type, name) of each field, in order."""
    body = params.text(kernel_plan).partition("struct Params {")[2].partition("};")[0]
    return [
        (match[1], match[2])
        for match in re.finditer(r"([\w ()]+\*?) ([\w\[\]]+);", body.replace("\n    ", "\n").strip())
    ]


def test_the_fields_of_a_forward() -> None:
    assert declared(plan(asked("float16"), H200, family="sm80")) == [
        ("const In*", "q"), ("const Kept*", "k"), ("const Kept*", "v"), ("Out*", "out"), ("Accum*", "lse"),
        ("const unsigned char*", "key_mask"), ("const unsigned char*", "mask"), ("const In*", "bias"),
        ("const float*", "alibi_slopes"), ("const In*", "sinks"), ("const long long*", "seed"),
        ("const int*", "key_lists"), ("const int*", "query_lists"), ("float*", "share_out"), ("float*", "share_lse"),
        ("Strides", "q_strides"), ("Strides", "k_strides"), ("Strides", "v_strides"), ("Strides", "out_strides"),
        ("PairStrides", "key_mask_strides"), ("PairStrides", "mask_strides"), ("PairStrides", "bias_strides"),
        ("PairStrides", "alibi_slopes_strides"), ("PairStrides", "sinks_strides"), ("Accum", "scale"),
        ("Accum", "factor"), ("Accum", "cap"), ("Accum", "cap_inverse"), ("int", "batch"),
        ("int", "heads_q"), ("int", "heads_k"), ("int", "seq_q"), ("int", "seq_k"), ("int", "dim"), ("int", "dim_v"),
        ("int", "diagonal"), ("int", "left"), ("int", "right"), ("int", "lists"),
        ("int", "lists_batch"), ("int", "lists_head"), ("Accum", "kept"), ("Accum", "log_kept"),
        ("unsigned", "drop_below"), ("Accum", "out_scale"), ("Accum", "near_cap_squared"), ("Accum", "near_cap_0"),
            ("Accum", "near_cap_1"), ("Accum", "near_cap_2"), ("Accum", "near_slope_1"), ("Accum", "near_slope_2"),
        ("int", "first_q"), ("int", "end_q"), ("int", "first_k"), ("int", "end_k"), ("int", "shares"),
        ("int", "combine_lanes"), ("alignas(8) unsigned", "round_keys[14]"),
    ]  # fmt: skip


def test_the_fields_of_a_backward() -> None:
    fields = declared(plan(asked("float16"), H200, BACKWARD, "sm90"))
    assert fields[:22] == [
        ("const In*", "q"), ("const In*", "k"), ("const In*", "v"), ("const In*", "out"), ("const Accum*", "lse"),
        ("const In*", "dout"), ("const Accum*", "dlse"), ("OutQ*", "dq"), ("Out*", "dk"), ("Out*", "dv"),
        ("const unsigned char*", "key_mask"), ("const unsigned char*", "mask"), ("const In*", "bias"),
        ("const float*", "alibi_slopes"), ("const In*", "sinks"), ("const long long*", "seed"),
        ("const int*", "key_lists"), ("const int*", "query_lists"),
        ("float*", "delta"), ("float*", "dq_sum"), ("unsigned*", "counters"), ("float*", "share_sums"),
    ]  # fmt: skip
    strided = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    assert [name for type, name in fields if type == "Strides"] == [f"{name}_strides" for name in strided]
    assert fields[-6:-1] == [("int", name) for name in ("together", "resident", "shares", "whole_heads", "cleared")]
    assert ("double*", "delta") in declared(plan(asked("float64"), H200, BACKWARD))


def test_a_source_does_not_depend_on_what_is_not_asked() -> None:
    """Every optional array has its pointer and strides, given or not. What a seed becomes has no room where none is
    asked for, and a score function's own arrays come beside them.
    """
    plain = {name: fields for name, fields in FEATURES.items() if "score" not in fields}
    texts = {name: params.text(plan(problem("float16", **x), H200, family="simt")) for name, x in plain.items()}
    keys = "unsigned round_keys[14]"
    for name, fields in plain.items():
        assert (f"    alignas(8) {keys};\n" in texts[name]) == ("dropout" in fields)
        texts[name] = texts[name].replace(f"alignas(8) {keys}", f"static constexpr {keys} = {{}}")
    assert len(set(texts.values())) == 1
    assert "score_array" not in texts["everything"]
    function = params.text(plan(problem("float16", **FEATURES["score"]), H200, family="simt"))
    assert "const float* score_array_0;" in function and "const int* score_array_1;" in function
    assert "ScoreShape score_array_1_shape;" in function
    for rule in OF_ALL:
        assert f" {rule.name};" in texts["everything"]
        assert (f"PairStrides {rule.name}_strides;" in texts["everything"]) == bool(rule.axes)


@everywhere
def test_values_stand_where_they_belong(family: str, dtype: str, of: Pass) -> None:
    """Read back through the record, whose fields the next test compares with a compiler's."""
    state = asked(dtype, family)
    kernel_plan = plan(state, H200, of, family)
    rowed = [row.name for row in of.rows if not row.per_query]
    strides = {name: (100 * i + 1, 100 * i + 2, 100 * i + 3) for i, name in enumerate(rowed)}
    strides |= {rule.name: (7 + n, 0, 5, 1) for n, rule in enumerate(OF_ALL) if rule.axes}
    packer = params.Packer(kernel_plan, state, strides)
    addresses = [2**48 + 256 * i for i in range(len(packer.slots))]
    record = np.frombuffer(packed(packer, addresses), params.layout(kernel_plan))[0]
    held = {name: record[name] for name in packer.slots if name not in params.KEYS}
    held |= zip(params.KEYS, record["round_keys"] if state.dropout else ())
    assert held == dict(zip(packer.slots, addresses))
    for name in rowed:
        assert [record[f"{name}_strides"][axis] for axis in ("batch", "row", "head")] == list(strides[name])
    for n, rule in enumerate(x for x in OF_ALL if x.axes):
        assert record[f"{rule.name}_strides"].tolist() == (7 + n, 0, 5, 1)
    for name in ("batch", "heads_q", "heads_k", "seq_q", "seq_k", "dim", "dim_v", "diagonal", "left", "right"):
        assert record[name] == getattr(state, name), name
    assert record["scale"] == pytest.approx(0.3) and record["factor"] == pytest.approx(0.3 * math.log2(math.e))
    softcap = state.softcap or 0
    assert record["cap"] == pytest.approx(softcap * math.log2(math.e))
    assert record["cap_inverse"] == pytest.approx(0.3 / softcap if softcap else 0)
    for name, value in kernel_plan.scalars:
        assert record[name] == value
    assert record["kept"] == 1 - state.dropout and record["log_kept"] == pytest.approx(math.log(1 - state.dropout))
    assert record["drop_below"] == state.dropout * 2**32


@pytest.mark.parametrize("family", ["sm90", "sm80", "simt"])
@pytest.mark.parametrize("of", [FORWARD, BACKWARD])
def test_all_that_may_be_asked_for_fits(family: str, of: Pass) -> None:
    """The parameters of a kernel are 4 KB where the driver is older, in which maps of TMA have their place,
    too."""
    names = [f"table{n}" for n in range(SCORE_ARRAYS)]
    text = " + ".join(f"{name}[h][i][j][b]" for name in names)
    score = trace(text, {name: ("bfloat16", 4, True) for name in names})
    everything = dataclasses.replace(asked("bfloat16"), softcap=None, score=score)
    asked_for = plan(everything, H200, of, family)
    size = params.layout(asked_for).itemsize + 128 * len(asked_for.maps)
    assert size <= 4096


def test_more_tangents_than_fit_are_refused() -> None:
    """Of arrays that a score function reads: of as many as may be 16 fit."""
    names = [f"x{n}" for n in range(SCORE_ARRAYS)]
    score = trace(" + ".join(f"{name}[j]" for name in names), {name: ("bfloat16", 1, True) for name in names})
    state = dataclasses.replace(asked("bfloat16"), softcap=None, score=score)

    def moving(count: int) -> AttentionProblem:
        return dataclasses.replace(state, tangents=tuple(Given(x.key, "bfloat16", ()) for x in score.arrays[:count]))

    for of in (JVP, BACKWARD_JVP):
        assert params.layout(plan(moving(16), H200, of, "simt")).itemsize <= 4096
    with pytest.raises(ValueError, match=r"tangents has 32 arrays that score reads.* 4096 fit: stack some"):
        plan(moving(32), H200, BACKWARD_JVP, "simt")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_an_array_points_to_what_it_holds(dtype: str) -> None:
    """To In where that is q's dtype, or where there is none."""
    own, single = (Given("bias", x, AXES) for x in (dtype, "float32"))
    for given, type in (((), "const In*"), ((own,), "const In*"), ((single,), "const float*")):
        if given != (single,) or dtype != "float32":
            assert dict(map(reversed, declared(plan(problem(dtype, given=given), H200))))["bias"] == type


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 1e30), ("float64", 1e290)])
def test_caps_stay_in_their_type(dtype: str, largest: float) -> None:
    """Whatever scale and softcap are allowed to be."""
    for scale, softcap in ((largest, 1 / largest), (1 / largest, largest), (0.0, 1.0)):
        state = problem(dtype, scale=scale, softcap=softcap)
        kernel_plan = plan(state, H200)
        packer = params.Packer(kernel_plan, state, {})
        record = np.frombuffer(packed(packer), params.layout(kernel_plan))[0]
        assert np.isfinite(record["cap"]) and np.isfinite(record["cap_inverse"]) and record["cap"] > 0


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e-3, 0.125, -3.0, 1e6, 1e30])
@pytest.mark.parametrize("softcap", [1e-30, 1e-4, 1.5, 20.0, 64.0, 1e6, 1e30])
@pytest.mark.parametrize(
    ("dtype", "largest", "off", "slope_off"), [("bfloat16", 1e6, 9e-5, 3e-5), ("float16", 64.0, 1e-5, 2.5e-4)]
)
def test_caps_near_zero(scale: float, softcap: float, dtype: str, largest: float, off: float, slope_off: float) -> None:
    """The polynomial is the cap's exponent of 2 and its slope, or is never taken; nothing in it leaves
    float32's range."""
    state = problem(dtype, scale=scale, softcap=softcap)
    kernel_plan = plan(state, H200)
    packer = params.Packer(kernel_plan, state, {})
    record = np.frombuffer(packed(packer), params.layout(kernel_plan))[0]
    bound, c0, c1, c2 = (record[name] for name in ("near_cap_squared", "near_cap_0", "near_cap_1", "near_cap_2"))
    d1, d2 = (record[name] for name in ("near_slope_1", "near_slope_2"))
    s = np.linspace(-1, 1, 1001, dtype=np.float32) * np.sqrt(bound)
    x = s * (c0 + s * s * (c1 + s * s * c2))
    slope = 1 + s * s * (d1 + s * s * d2)
    capped = s.astype(float) * abs(scale) / softcap
    tanh = np.tanh(capped)
    assert x.dtype == slope.dtype == np.float32 and np.isfinite([c0, c1, c2, d1, d2]).all()
    cap = softcap * math.log2(math.e)
    assert np.abs(x - cap * tanh).max() <= off * cap
    assert (np.abs(x - cap * tanh) <= 1e-3 * cap * np.abs(tanh))[np.abs(capped) > 0].all()  # small ones too
    assert (np.abs(slope - (1 - tanh * tanh)) <= slope_off * (1 - tanh * tanh)).all()
    assert bool(bound) == (1e-4 <= softcap <= largest and 1e-9 <= abs(scale) / softcap <= 1e4)
    assert dtype == "float16" or c2 == 0  # which kernels leave out


@pytest.mark.parametrize(("dtype", "least"), [("float16", 1e-30), ("float32", 1e-30), ("float64", 1e-300)])
def test_the_factor_is_never_0(dtype: str, least: float) -> None:
    state = problem(dtype, scale=0.0)
    kernel_plan = plan(state, H200)
    packer = params.Packer(kernel_plan, state, {})
    record = np.frombuffer(packed(packer), params.layout(kernel_plan))[0]
    assert record["scale"] == 0 and record["factor"] == pytest.approx(least)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to be compared with")
def test_a_compiler_lays_it_out_alike(tmp_path: Path) -> None:
    """Size and the offset of every field, for every family, pass and type of sums, with a scalar more or less."""
    checks = []
    for number, (case, more) in enumerate(itertools.product(PLANS, ((), (("odd", 1),)))):
        family, dtype, of = case.values
        kernel_plan = plan(asked(dtype, family), H200, of, family)  # type: ignore[arg-type]
        kernel_plan = dataclasses.replace(kernel_plan, scalars=(*kernel_plan.scalars, *more))
        record = params.layout(kernel_plan)
        types = [*zip(("In", "Product", "Out", "Accum"), params.TYPES[kernel_plan.dtype])]
        types += [("OutQ", "Out"), ("Kept", "In")]
        offsets = [(f"offsetof(Params, {name})", record.fields[name][1]) for name in record.names]  # type: ignore[index]
        offsets += [("sizeof(Params)", record.itemsize), ("offsetof(PairStrides, key)", 24), ("sizeof(Strides)", 24)]
        checks += [
            f"namespace plan_{number} {{", *(f"using {name} = {type};" for name, type in types),
            params.text(kernel_plan),
            *(f'static_assert({what} == {value}, "{family} {dtype} {what}");' for what, value in offsets), "}",
        ]  # fmt: skip
    assert sum(line.startswith("static_assert(offsetof(Params") for line in checks) > 20 * len(PLANS)
    file = tmp_path / "params.cpp"
    half = "struct half_t { unsigned short bits; };\nstruct bfloat16_t { unsigned short bits; };\n"
    file.write_text("#include <cstddef>\n" + half + "\n".join(checks))
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:2000]


def test_which_pattern_of_a_block_mask_is_that_of_a_head() -> None:
    wanted = {
        None: (1, 0, 0),
        (): (1, 0, 0),
        ("batch",): (3, 1, 0),
        ("head",): (10, 0, 1),
        ("batch", "head"): (30, 10, 1),
    }
    for axes, numbers in wanted.items():
        given = dataclasses.replace(asked("float16"), block_mask=axes)
        kernel_plan = plan(given, H200, family="sm80")
        packer = params.Packer(kernel_plan, given, {})
        record = np.frombuffer(packed(packer), params.layout(kernel_plan))
        assert tuple(int(record[name][0]) for name in ("lists", "lists_batch", "lists_head")) == numbers
