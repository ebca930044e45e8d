"""Who has which place among those of packed sequences, as a warp finds it, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_on_cpu import as_cpp, compile_all, needs_compiler
from lengths_on_cpu import Sequences
from on_cpu import Guarded, run
from reference import state

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_forward
from cupyflash.gpu.source import generate

pytestmark = needs_compiler


PLACES = """
extern "C" __global__ void attention_places(const Params p) {
    using Tiles = QueryTiles<HEAD_ROWS>;
    for (int place = blockIdx.x; place < Tiles::of_head(p); place += gridDim.x) {
        int n = 18 * place;
        for (HeadTile at : {Tiles::placed_by_warp(p, place, 0), Tiles::placed_of_all(p, place, 0),
                            Tiles::placed(p, place, 0)})
            for (int x : {at.number, at.head.number(), at.head.first_query(), at.head.queries(p), at.head.first_key(),
                          at.head.keys(p)})
                p.lse[n++] = x;
    }
}
"""


@pytest.mark.parametrize("said", ["lengths", "rising", "nonsense"])
@pytest.mark.parametrize("count", [1, 7, 33, 1200])
def test_a_warp_finds_what_has_each_place(count: int, said: str, rng: np.random.Generator) -> None:
    lengths_q, lengths_k = (rng.choice([0, 1, 63, 64, 65, 130], count).tolist() for _ in range(2))
    of = Sequences(rng, lengths_q, lengths_k, dtype="float16", dims=(64, 64), heads=(1, 1), behind=70)
    given = {name: of.of_queries(name) if name == "q" else of.of_keys(name) for name in "qkv"} | of.lengths()
    offsets = given["cu_seqlens_q"]
    for name in ("q", "k") if said != "lengths" else ():
        at = rng.permutation(count + 1)[: count // 2 + 1]
        given[f"cu_seqlens_{name}"][at] = rng.integers(-9, len(given[name]) + 9, len(at))
        if said == "rising":  # from 5 on
            given[f"cu_seqlens_{name}"][...] = np.sort(given[f"cu_seqlens_{name}"]).clip(5)
    made = sm90_forward.plan(state(**given), Arch.of("sm_90a"), None)
    [library] = compile_all(as_cpp(generate(made) + PLACES, ["attention_places"]))
    launch = next(x for x in made.launches if x.name == "attention_forward")
    made = replace(made, launches=(replace(launch, name="attention_places", grid=9, threads=32),))
    arrays = {name: Guarded(x.shape, x.dtype, x, rows_aligned=True) for name, x in given.items()}
    rows, size = len(given["q"]), dict(made.constants)["WARPGROUPS"] * 64 // dict(made.constants)["PACK"]
    places = rows // size + count + 1
    arrays |= {"out": Guarded(given["q"].shape, "f2"), "lse": Guarded((1, max(rows, 18 * places)), "f4")}
    run(library, made, state(**given), arrays, False, 2)
    found, of_all, searched = (
        arrays["lse"].array.ravel()[: 18 * places].astype(int).reshape(places, 3, 6).swapaxes(0, 1)
    )
    tile, n, first, length = found[:, :4].T
    real = tile >= 0
    covered = np.zeros(rows, int)
    for t, begin, end in zip(tile[real], first[real], (first + length)[real]):
        covered[begin + t * size : min(end, begin + (t + 1) * size)] += 1
    assert (covered == 1).all()  # each row once, whatever offsets say
    if said != "nonsense":  # wherever the first begins
        assert (found == of_all).all() and (found == searched).all()
    if said == "lengths":
        assert (first[real] == np.append(offsets, 0)[n[real]]).all()
        assert (length[real] == np.append(lengths_q, 70)[n[real]]).all()
        seen = real & (n < count)
        assert (found[seen, 4] == given["cu_seqlens_k"][n[seen]]).all()
        assert (found[seen, 5] == np.asarray(lengths_k)[n[seen]]).all()
