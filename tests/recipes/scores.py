"""What changes a score: scalars on the product and added to it; an array that is added, and one with a gradient."""

from __future__ import annotations

from . import Edit, Recipe, before, behind, instead

PROBLEM, API, PAIRS = "cupyflash/problem.py", "cupyflash/api.py", "cupyflash/cpu/pairs.py"
PLAN, PARAMS = "cupyflash/gpu/kernel_plan.py", "cupyflash/gpu/params.py"
SEAM, TERMS = "kernels_cu/attention/pairs.cuh", "kernels_cu/attention/terms.cuh"
GRADIENTS, TANGENTS = "kernels_cu/attention/array_gradient.cuh", "kernels_cu/attention/tangents.cuh"


def in_api(name: str, type: str, default: str, said: str) -> tuple[Edit, ...]:
    """An argument behind softcap."""
    return (
        behind(API, "    softcap: float | None\n", f"    {name}: {type}\n"),  # what type checkers are told
        behind(API, "    softcap: float | None = None,\n", f"    {name}: {type} = {default},\n", everywhere=True),
        before(API, "    key_mask : (B, Sk) bool, optional\n", said),
    )


def option(name: str, said: str) -> tuple[Edit, ...]:
    return (
        behind(PROBLEM, "    softcap: float | None = None\n", f"    {name}: float = 0.0\n"),
        *in_api(name, "float", "0.0", said),
        behind(API, '"softcap": softcap, ', f'"{name}": {name}, ', everywhere=True),
    )


# s / sqrt(1 + (s / c)^2) of the scaled product s.
ON_PRODUCT = Recipe(
    "a scalar on the product",
    (
        *option("squash", "    squash : float\n        c: the scaled product s becomes s / sqrt(1 + (s / c)^2).\n"),
        before(
            PROBLEM,
            "def check_dropout(",
            """def _check_squash(squash: Any) -> float:
    value = real("squash", squash) or 0.0
    if value < 0:
        raise ValueError(f"squash is {value}; it must be more than 0, or 0 for none")
    return value


""",
        ),
        before(
            PROBLEM,
            '    OptionRule("score", None',
            '    OptionRule("squash", 0.0, "c: score / sqrt(1 + (score / c)^2).", _check_squash, number=True),\n',
        ),
        before(
            PAIRS,
            "    def slope(",
            """    def _squashed(self, s: np.ndarray) -> np.ndarray:
        x = s / s.dtype.type(self.problem.squash)
        return 1 / np.sqrt(1 + x * x)

""",
        ),
        before(
            PAIRS,
            "        if self.problem.softcap is not None:\n            np.multiply(",
            """        if self.problem.squash:
            s *= self._squashed(s)
""",
        ),
        before(
            PAIRS,
            "        if self.problem.softcap is None:\n            return None\n",
            """        if self.problem.squash:
            return self._squashed(s) ** 3
""",
        ),
        before(
            PAIRS,
            "        if self.problem.softcap is None or ts is None:\n            return None\n",
            """        if self.problem.squash and ts is not None:
            return s.dtype.type(-3 / self.problem.squash**2) * s * self._squashed(s) ** 5 * ts
""",
        ),
        before(
            TANGENTS,
            "        if (!config::SOFTCAP || !PRODUCTS_MOVE) return 0;\n",
            """        if (config::SQUASH && PRODUCTS_MOVE) {
            Accum inverse = config::NEGATIVE_SCALE ? -p.squash_inverse : p.squash_inverse;
            return -3 * s * p.squash_inverse * inverse * cube(squashed(s)) * squashed(s) * squashed(s) * ts;
        }
""",
        ),
        instead(TANGENTS, "user::BENDS : config::SOFTCAP &&", "user::BENDS : (config::SOFTCAP || config::SQUASH) &&"),
        before(PLAN, '        ("SOFTCAP", ', '        ("SQUASH", problem.squash > 0),\n'),
        before(PLAN, "problem.softcap is not None or problem.score ", "problem.squash > 0 or "),
        before(
            PARAMS,
            '    "batch": ("int"',
            '    "squash_inverse": ("Accum", lambda p: abs(p.scale) / p.squash if p.squash else 0.0),\n',
        ),
        instead(SEAM, "bool SCORED = config::SOFTCAP ||", "bool SCORED = config::SQUASH || config::SOFTCAP ||"),
        before(
            SEAM,
            "        return config::SOFTCAP ? hyperbolic_tangent<In>",
            "        if (config::SQUASH) return s * squashed(s);\n",
        ),
        before(
            SEAM,
            "        if (!config::SOFTCAP) return sign;\n",
            "        if (config::SQUASH) return sign * cube(squashed(s));\n",
        ),
        before(
            SEAM,
            "    // The scaled product: what score functions start from.\n",
            """    __device__ static Accum cube(Accum x) { return x * x * x; }
    __device__ Accum squashed(Accum s) const {
        Accum x = s * p.squash_inverse;
        return 1 / sqrt(1 + x * x);
    }

""",
        ),
    ),
)

TERM = "template <class Of, bool GIVEN, int M"  # what stands behind the last term
LAST = "        for name in self._terms:\n"  # what arrays add

# slope (j - i - diagonal)
ADDED_SCALAR = Recipe(
    "a scalar that is added",
    (
        *option("slant", "    slant : float\n        Times the key's place beside the query's diagonal, is added.\n"),
        before(
            PROBLEM,
            '    OptionRule("score", None',
            """    OptionRule(
        "slant", 0.0, "What a key to the right adds.", lambda x: real("slant", x) or 0.0, number=True, adds=True
    ),
""",
        ),
        before(
            PAIRS,
            LAST,
            """        if self.problem.slant:
            s += self.problem.slant * self._over(at, lambda stands, positions: positions - stands).astype(s.dtype)
""",
        ),
        before(
            TERMS,
            TERM,
            """struct Slant : Term<Slant> {
    static constexpr bool GIVEN = config::SLANT;

    __device__ static Accum onto(Accum x, const Params& p, const Head& head, Pair at) {
        return plus(x, Added{p.slant * LOG2E, Accum(at.j - at.i - head.diagonal(p))});
    }
};

""",
        ),
        instead(TERMS, "using Terms = TermList<Alibi,", "using Terms = TermList<Slant, Alibi,"),
    ),
)

ROW = """    ArrayRule("key_bias", ("batch", "key"), ("q", "float32"), "bias of keys", "added to scores", adds=True),
"""

# A number for each key.
ADDED_ARRAY = Recipe(
    "an array that is added",
    (
        before(PROBLEM, '    ArrayRule("sinks", ', ROW),
        *in_api(
            "key_bias",
            "Array | None",
            "None",
            "    key_bias : (B, Sk), optional\n        Added to the scores of each key.\n",
        ),
        instead(API, "key_mask is mask", "key_mask is key_bias is mask", everywhere=True),
        before(API, '"key_mask": key_mask, ', '"key_bias": key_bias, ', everywhere=True),
        before(
            PAIRS,
            '        if name == "bias":\n',
            """        if name == "key_bias":
            return x[self.batches, None, None, self.columns(at)].astype(work)
""",
        ),
        before(
            TERMS,
            TERM,
            """struct KeyBias : Term<KeyBias> {
    static constexpr bool GIVEN = config::KEY_BIAS;

    __device__ static Accum onto(Accum x, const Params& p, const Head& head, Pair at) {
        const PairStrides& s = p.key_bias_strides;
        const auto* of_key = p.key_bias + head.batch * s.batch + at.j * s.key;
        return at.j < head.keys(p) ? plus(x, Added{to_float(*of_key), LOG2E}) : x;
    }
};

""",
        ),
        instead(TERMS, ", Bias>;\n", ", Bias, KeyBias>;\n"),
    ),
)
WITH_GRADIENT = Recipe(
    "an array with a gradient",
    (
        *ADDED_ARRAY.edits,
        instead(PROBLEM, ROW, ROW.replace("adds=True", "adds=True, gradient=True")),
        behind(
            TERMS,
            "    static constexpr bool GIVEN = config::KEY_BIAS;\n",
            """    static constexpr bool MOVES = config::TKEY_BIAS;

    template <class Given>
    __device__ static Accum tangent(const Given& p, const Head& head, Pair at) {
        const PairStrides& s = p.tkey_bias_strides;
        return at.j < head.keys(p) ? Accum(to_float(p.tkey_bias[head.batch * s.batch + at.j * s.key])) : 0;
    }
""",
        ),
        before(
            GRADIENTS,
            "// KERNELS(",
            """struct OfKeyBias : OfPairs {
    IN_PARAMS(key_bias)
};

""",
        ),
        behind(GRADIENTS, "config::D_ALIBI_SLOPES, OfSlopes)", " KERNELS(key_bias, config::D_KEY_BIAS, OfKeyBias)"),
    ),
)
