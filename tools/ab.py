"""old tree beside new: 72 rows, random problems, bits."""
import os, sys, json, random, time, statistics, itertools
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, os.path.dirname(__file__)); sys.path.insert(0, os.getcwd())
import torch
import cupyflash as new, cupyflash_old as old
assert "cupyflash_old" in old.__file__ and "cupyflash/" in new.__file__
OUT = os.environ.get("OUT", "/tmp")
what = set(sys.argv[1:]) or {"grid", "random", "bits"}
dev = "cuda"
def rows():
    for S in (512, 1024, 2048, 4096, 8192, 16384):
        for d in (64, 128, 256):
            for causal in (False, True):
                yield dict(B=16384 // S, S=S, H=2048 // d, d=d, causal=causal)
def extra():
    for d in (64, 128):
        for S in (2048, 8192):
            for w in (256, 1024): yield dict(B=16384 // S, S=S, H=2048 // d, d=d, causal=True, window=(w, 0))
    yield dict(B=8, S=2048, H=16, d=96, causal=True); yield dict(B=8, S=2048, H=16, d=192, causal=True); yield dict(B=2, S=577, H=16, d=64, causal=False)
    yield dict(B=2, S=4096, H=32, Hk=4, d=128, causal=True)
def opts(r):
    o = dict(causal=r["causal"])
    if "window" in r: o["window"] = r["window"]
    return o
def compile_all(rs):
    def one(a):
        pkg, r, back, det = a
        o = opts(r)
        if det: o["deterministic"] = True
        kv = (r["B"], r["S"], r.get("Hk", r["H"]), r["d"])
        return pkg.explain((r["B"], r["S"], r["H"], r["d"]), kv, kv, dtype="bfloat16", backward=back, **o)
    for p in (old, new): p.explain((1, 64, 1, 64), dtype="bfloat16")
    seen = {}
    for r in rs:
        for p in (old, new):
            for back in (False, True): seen[(p.__name__, r["S"] > 1024, r["S"], r["d"], r["causal"], r.get("window"), back, r["B"])] = (p, r, back, False)
    with ThreadPoolExecutor(16) as pool: list(pool.map(one, seen.values()))
def bench(rs, rounds=7, ms=6.0):
    res = []
    for r in rs:
        g = torch.Generator(dev).manual_seed(1)
        t = lambda h: torch.randn(r["B"], r["S"], h, r["d"], device=dev, dtype=torch.bfloat16, generator=g)
        q, k, v, do = t(r["H"]), t(r.get("Hk", r["H"])), t(r.get("Hk", r["H"])), t(r["H"])
        o = opts(r)
        outs = {n: p.attention(q, k, v, return_lse=True, **o) for n, p in (("old", old), ("new", new))}
        grads = {n: p.attention_backward(do, q, k, v, *outs[n], **o) for n, p in (("old", old), ("new", new))}
        diff = [float((a.float() - b.float()).abs().max()) for a, b in zip((*outs["old"], *grads["old"]), (*outs["new"], *grads["new"]))]
        nan = any(bool(torch.isnan(x.float()).any()) for x in (*outs["new"], *grads["new"]))
        calls = {("fwd", n): (lambda p=p: p.attention(q, k, v, **o)) for n, p in (("old", old), ("new", new))}
        calls |= {("bwd", n): (lambda p=p, n=n: p.attention_backward(do, q, k, v, *outs[n], **o)) for n, p in (("old", old), ("new", new))}
        reps, times = {}, {c: [] for c in calls}
        def time_it(c, n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(n): calls[c]()
            b.record(); b.synchronize()
            return a.elapsed_time(b) / n
        for c in calls: reps[c] = max(3, int(ms / max(1e-3, time_it(c, 3))))
        for i in range(rounds):
            for pas in ("fwd", "bwd"):
                order = ["old", "new"] if (i + (pas == "bwd")) % 2 else ["new", "old"]
                for n in order: times[pas, n].append(time_it((pas, n), reps[pas, n]))
        med = {c: statistics.median(x) for c, x in times.items()}
        row = dict(r, fwd=med["fwd", "old"] / med["fwd", "new"], bwd=med["bwd", "old"] / med["bwd", "new"], ms={f"{a} {b}": x for (a, b), x in med.items()}, diff=diff, nan=nan)
        res.append(row)
        print({k: v for k, v in r.items()}, "fwd %.3f bwd %.3f" % (row["fwd"], row["bwd"]), "diff", ["%.2g" % x for x in diff], "NAN" if nan else "", flush=True)
    return res
def geo(x): return statistics.geometric_mean(x)
if "grid" in what:
    t = time.time(); compile_all(list(rows()) + (list(extra()) if "extra" in what else [])); print("compiled", time.time() - t, flush=True)
    r = bench(list(rows()))
    e = bench(list(extra())) if "extra" in what else []
    json.dump(r + e, open(f"{OUT}/ab.json", "w"))
    print("GRID fwd geo %.4f worst %.3f | bwd geo %.4f worst %.3f" % (geo([x["fwd"] for x in r]), min(x["fwd"] for x in r), geo([x["bwd"] for x in r]), min(x["bwd"] for x in r)))
if "random" in what:
    seed = int(os.environ.get("SEED", "0")) or time.time_ns() % 2**32; rng = random.Random(seed); bad = 0; torch.manual_seed(seed)
    n, kinds = int(os.environ.get("N", "150")), int(os.environ.get("KINDS", "60")); problems = []
    for kind in range(kinds):
        d = rng.choice([16, 40, 64, 80, 96, 128, 160, 192, 256]); dv = rng.choice([d, d, d, 64, 128]); fam = rng.choice(["sm90"] * 4 + ["sm80", "simt"])
        dt = rng.choice(["bfloat16", "float16"]) if fam != "simt" else rng.choice(["float32", "bfloat16", "float64"])
        causal = rng.choice([False, True, "top_left"]); win = rng.choice([0, 0, 1, 2]); neg = rng.random() < .15; km = rng.random() < .25; det = rng.random() < .3
        for _ in range(n // kinds):
            hk = rng.choice([1, 2, 3]); g = rng.choice([1, 1, 2, 8]); big = rng.random() < .2
            sq, sk = (rng.choice([1, 7, 63, 64, 65, rng.randrange(1, 300), rng.randrange(1, 1500 if big else 500)]) for _ in range(2))
            w = None if win == 0 else (rng.randrange(300), rng.randrange(60)) if win == 1 else rng.choice([(None, rng.randrange(50)), (rng.randrange(200), None)])
            sc = rng.choice([None, None, 0.0, 1.5]) if not neg else -rng.random()
            problems.append((fam, dt, rng.choice([1, 2, 3]), sq, sk, hk * g, hk, d, dv, dict(causal=causal, window=w, scale=sc), km, det))
    def comp(a):
        p, (fam, dt, B, sq, sk, hq, hk, d, dv, o, km, det) = a
        for back in (False, True):
            kw = dict(o, family=fam)
            if back: kw["deterministic"] = det
            try: p.explain((B, sq, hq, d), (B, sk, hk, d), (B, sk, hk, dv), dtype=dt, backward=back, key_mask=(B, sk) if km else None, **kw)
            except Exception as e: print(p.__name__, e, flush=True)
    t = time.time()
    with ThreadPoolExecutor(16) as pool: list(pool.map(comp, [(p, x) for x in problems for p in (old, new)]))
    print("compiled", time.time() - t, flush=True)
    for fam, dt, B, sq, sk, hq, hk, d, dv, o, km, det in problems:
        T = getattr(torch, dt)
        mk = lambda *s: torch.randn(*s, device=dev).to(T)
        q, k, v, do = mk(B, sq, hq, d), mk(B, sk, hk, d), mk(B, sk, hk, dv), mk(B, sq, hq, dv)
        m = (torch.rand(B, sk, device=dev) < .6) if km else None
        try:
            res = {}
            for nme, p in (("old", old), ("new", new)):
                poison = [torch.full((x.numel() * 2 + 64,), float("nan"), device=dev) for x in (q, k, v, do)]; del poison
                ol = p.attention(q, k, v, key_mask=m, return_lse=True, family=fam, **o)
                res[nme] = (*ol, *p.attention_backward(do, q, k, v, *ol, key_mask=m, family=fam, deterministic=det, **o))
            for nm, a, b in zip(("out", "lse", "dq", "dk", "dv"), res["old"], res["new"]):
                a, b = a.double(), b.double()
                fin = torch.isfinite(a)
                tol = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5, "float64": 1e-12}[dt] if nm != "lse" else {"float64": 1e-12}.get(dt, 1e-5)
                err = torch.where(fin, a - b, 0.).abs().amax() if a.numel() else torch.zeros(())
                size = torch.where(fin, a, 0.).abs().amax() if a.numel() else torch.zeros(())
                if not torch.equal(fin, torch.isfinite(b)) or float(err) > tol * max(1, float(size)):
                    bad += 1; print("DIFF", nm, float(err), float(size), fam, dt, B, sq, sk, hq, hk, d, dv, o, km, det, flush=True)
        except Exception as e:
            bad += 1; print("ERR", type(e).__name__, str(e)[:300], fam, dt, B, sq, sk, hq, hk, d, dv, o, km, det, flush=True)
    print("RANDOM", len(problems), "seed", seed, "bad", bad, "seconds", time.time() - t)
if "bits" in what:
    for S, d, causal in ((768, 96, True), (200, 80, False), (200, 96, False), (257, 128, True), (257, 80, False), (384, 111, True), (1024, 128, True)):
        q, k, v = (torch.randn(60, S, 4, d, device=dev).bfloat16() for _ in range(3))
        a = new.attention(q, k, v, causal=causal, return_lse=True); n = 0
        for _ in range(100):
            b = new.attention(q, k, v, causal=causal, return_lse=True); n += not (torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]))
        print("BITS", S, d, causal, "differs in", n, "of 100")
    for dt in (torch.bfloat16, torch.float32):
        for fam in ("sm90", "sm80", "simt"):
            if dt == torch.float32 and fam != "simt": continue
            for sk, d in ((1, 64), (300, 128), (300, 256)):
                q = torch.full((1, 5, 1, d), 133120., device=dev, dtype=dt); k = torch.full((1, sk, 1, d), 133120., device=dev, dtype=dt); k[:, sk // 2] *= 1.5
                v = torch.randn(1, sk, 1, d, device=dev).to(dt)
                o = new.attention(q, k, v, family=fam); print("HUGE", fam, dt, sk, d, float((o[0, :, 0] - v[0, sk // 2, 0]).abs().max()))
