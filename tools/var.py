"""Variants beside old. usage: var.py fwd|bwd names... ; rows from ROWS env"""
import os, sys, importlib, statistics, time, json
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, os.path.dirname(__file__))
import torch
pas = sys.argv[1]; names = ["old"] + sys.argv[2:]
P = {n: importlib.import_module(f"cupyflash_{n}") for n in names}
dev = "cuda"
ROWS = eval(open(os.path.join(os.path.dirname(__file__), os.environ.get("ROWS", "rows.py"))).read())
def opts(r):
    o = dict(causal=r.get("causal", False))
    if "window" in r: o["window"] = r["window"]
    return o
def one(a):
    p, r, back = a
    kv = (r["B"], r.get("Sk", r["S"]), r.get("Hk", r["H"]), r["d"]); vv = (*kv[:3], r.get("dv", r["d"]))
    try: p.explain((r["B"], r["S"], r["H"], r["d"]), kv, vv, dtype="bfloat16", backward=back, **opts(r))
    except Exception as e: print("explain", p.__name__, e)
for p in P.values(): p.explain((1, 64, 1, 64), dtype="bfloat16")
with ThreadPoolExecutor(16) as pool: list(pool.map(one, [(p, r, b) for p in P.values() for r in ROWS for b in ((False, True) if pas != "fwd" else (False,))]))
ratios = {n: [] for n in names}
rounds = int(os.environ.get("ROUNDS", "8"))
for r in ROWS:
    t = lambda s, h, d: torch.randn(r["B"], s, h, d, device=dev).bfloat16()
    Sk, Hk, dv = r.get("Sk", r["S"]), r.get("Hk", r["H"]), r.get("dv", r["d"])
    q, k, v, do = t(r["S"], r["H"], r["d"]), t(Sk, Hk, r["d"]), t(Sk, Hk, dv), t(r["S"], r["H"], dv)
    o = opts(r); calls = {}
    ref = None
    for n, p in P.items():
        out = p.attention(q, k, v, return_lse=True, **o)
        if pas == "fwd": calls[n] = lambda p=p: p.attention(q, k, v, **o); res = out[0]
        else: calls[n] = lambda p=p, out=out: p.attention_backward(do, q, k, v, *out, **o); res = torch.cat([x.flatten().float() for x in calls[n]()])
        if ref is None: ref = res.float()
        else:
            e = float((res.float() - ref).abs().max())
            if not e < 0.05: print("WRONG", n, r, e)
    def time_it(c, n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(n): c()
        b.record(); b.synchronize()
        return a.elapsed_time(b) / n
    times = {n: [] for n in names}
    reps = {n: max(3, int(5 / max(1e-3, time_it(calls[n], 5)))) for n in names}
    for i in range(rounds):
        for n in names[i % len(names):] + names[:i % len(names)]: times[n].append(time_it(calls[n], reps[n]))
    m = {n: statistics.median(x) for n, x in times.items()}
    for n in names: ratios[n].append(m["old"] / m[n])
    print(str({k: v for k, v in r.items()}), "ms %.3f" % m["old"], *["%s %.3f" % (n, m["old"] / m[n]) for n in names[1:]], flush=True)
print("GEO", *["%s %.4f" % (n, statistics.geometric_mean(x)) for n, x in ratios.items()])
