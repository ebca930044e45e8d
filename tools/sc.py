import os, sys, random, time, statistics
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, os.path.dirname(__file__))
import torch, cupyflash_sc as new
dev = "cuda"; rng = random.Random(int(os.environ.get("SEED", "5"))); torch.manual_seed(7)
def draw(kind):
    fam, dt, d, dv, feats, causal = kind
    hk = rng.choice([1, 2]); g = rng.choice([1, 2, 4]); sq = rng.choice([1, 5, 64, 130, rng.randrange(1, 400)]); sk = rng.choice([1, 77, 128, 300, rng.randrange(1, 400)]); B = rng.choice([1, 2, 40])
    if B == 40: sq = min(sq, 6)
    return fam, dt, B, sq, sk, hk * g, hk, d, dv, feats, causal
FE = ["softcap", "alibi", "bias", "mask", "sinks"]
kinds = []
for fam in ("sm90", "sm80", "simt"):
    for feats in ([f] for f in FE): kinds.append((fam, "bfloat16" if fam != "simt" else "float32", rng.choice([64, 128]), None, feats, rng.choice([False, True])))
    for d in (64, 128, 256): kinds.append((fam, "float16" if fam != "simt" else "float64", d, None, FE, rng.choice([False, True])))
    kinds.append((fam, "bfloat16", 192, 128, rng.sample(FE, 3), True)); kinds.append((fam, "bfloat16", 128, None, rng.sample(FE, 2), False))
kinds = [(f, t, d, dv or d, fe, c) for f, t, d, dv, fe, c in kinds]
probs = [draw(k) for k in kinds for _ in range(int(os.environ.get("EACH", "12")))]
def args(p, real):
    fam, dt, B, sq, sk, hq, hk, d, dv, feats, causal = p
    T = getattr(torch, dt); o = dict(causal=causal)
    mk = (lambda *s: torch.randn(*s, device=dev)) if real else (lambda *s: s)
    if "softcap" in feats: o["softcap"] = 3.0
    sh = lambda: tuple(1 if r < .3 else n for n, r in zip((B, hq, sq, sk), (rng.random() for _ in range(4))))
    if "alibi" in feats: o["alibi_slopes"] = mk(hq).abs() * .1 if real else (hq,)
    if "bias" in feats:
        s = sh(); o["bias"] = mk(*s).to(T) if real else s
    if "mask" in feats:
        s = sh(); o["mask"] = (torch.rand(*s, device=dev) < .7) if real else s
    if "sinks" in feats: o["sinks"] = mk(hq).to(T) if real else (hq,)
    return o
def comp(p):
    fam, dt, B, sq, sk, hq, hk, d, dv, feats, causal = p
    for back in (False, True):
        try: new.explain((B, sq, hq, d), (B, sk, hk, d), (B, sk, hk, dv), dtype=dt, backward=back, family=fam, **args(p, False))
        except Exception as e: print("explain", type(e).__name__, str(e)[:200], flush=True)
new.explain((1, 64, 1, 64), dtype="bfloat16")
t0 = time.time()
with ThreadPoolExecutor(16) as pool: list(pool.map(comp, probs))
print("compiled", time.time() - t0, flush=True)
def ref(p, q, k, v, do, o, dt):
    B, sq, hq, sk = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    q, k, v = (x.detach().to(dt).requires_grad_() for x in (q, k, v)); g = hq // k.shape[2]
    K, V = k.repeat_interleave(g, 2), v.repeat_interleave(g, 2)
    s = torch.einsum("bqhd,bkhd->bhqk", q, K) * q.shape[-1] ** -0.5
    if "softcap" in o: s = o["softcap"] * torch.tanh(s / o["softcap"])
    i, j = torch.arange(sq, device=dev)[:, None], torch.arange(sk, device=dev)[None]
    if "alibi_slopes" in o: s = s - o["alibi_slopes"].to(dt)[None, :, None, None] * (i + sk - sq - j).abs().to(dt)
    if "bias" in o: s = s + o["bias"].to(dt)
    vis = torch.ones(B, hq, sq, sk, dtype=torch.bool, device=dev)
    if o["causal"]: vis = vis & (j <= i + sk - sq)
    if "mask" in o: vis = vis & o["mask"]
    s = s.masked_fill(~vis, float("-inf"))
    if "sinks" in o: s = torch.cat([s, o["sinks"].to(dt)[None, :, None, None].expand(B, hq, sq, 1)], -1)
    lse = torch.logsumexp(s, -1); P = torch.exp(s - torch.where(lse == -float("inf"), 0., lse)[..., None])
    out = torch.einsum("bhqk,bkhd->bqhd", P[..., :sk], V)
    gr = torch.autograd.grad(out, (q, k, v), do.to(dt))
    return (out.detach(), lse.detach(), *gr)
bad = 0; worst = {}
for p in probs:
    fam, dt, B, sq, sk, hq, hk, d, dv, feats, causal = p; T = getattr(torch, dt)
    q, k, v, do = (torch.randn(B, s, h, x, device=dev).to(T) for s, h, x in ((sq, hq, d), (sk, hk, d), (sk, hk, dv), (sq, hq, dv)))
    o = args(p, True); det = rng.random() < .3
    try:
        ol = new.attention(q, k, v, return_lse=True, family=fam, **o)
        got = (*ol, *new.attention_backward(do, q, k, v, *ol, family=fam, deterministic=det, **o))
    except Exception as e:
        bad += 1; print("ERR", type(e).__name__, str(e)[:200], p, flush=True); continue
    ex = ref(p, q, k, v, do, o, torch.float64); own = ref(p, q, k, v, do, o, T)
    for nm, x, e, w in zip(("out", "lse", "dq", "dk", "dv"), got, ex, own):
        x, e, w = x.double(), e.double(), torch.nan_to_num(w.double())
        fin = torch.isfinite(e)
        err = torch.where(fin, x - e, 0.).abs().max().item() if e.numel() else 0
        okn = torch.equal(fin, torch.isfinite(x))
        allow = 2 * torch.where(fin, w - e, 0.).abs().max().item() + (1e-5 if dt != "float64" else 1e-11) + (2e-3 if "softcap" in feats and dt == "bfloat16" else 0)
        r = err / allow; key = (fam, nm); worst[key] = max(worst.get(key, 0), r)
        if not okn or r > 1: bad += 1; print("BAD", nm, "%.3g/%.3g" % (err, allow), okn, p, det, {n: tuple(x.shape) for n, x in o.items() if hasattr(x, "shape")}, flush=True)
print("SCORES", len(probs), "bad", bad, {f"{a} {b}": round(c, 2) for (a, b), c in worst.items()})
if os.environ.get("SPEED"):
    for d in (64, 128):
        B, S, H = 8, 2048, 2048 // d
        q, k, v, do = (torch.randn(B, S, H, d, device=dev).bfloat16() for _ in range(4))
        F = {"none": {}, "softcap": dict(softcap=50.), "alibi": dict(alibi_slopes=torch.rand(H, device=dev)), "sinks": dict(sinks=torch.rand(H, device=dev).bfloat16()), "bias1HSS": dict(bias=torch.randn(1, H, S, S, device=dev).bfloat16()), "mask11SS": dict(mask=torch.rand(1, 1, S, S, device=dev) < .7), "keybias": dict(bias=torch.randn(1, 1, 1, S, device=dev).bfloat16())}
        for c in (False, True):
            base = None; line = []
            for n, o in F.items():
                ol = new.attention(q, k, v, causal=c, return_lse=True, **o); ts = []
                for f in (lambda: new.attention(q, k, v, causal=c, **o), lambda: new.attention_backward(do, q, k, v, *ol, causal=c, **o)):
                    f(); a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True); r = []
                    for _ in range(5):
                        a.record(); [f() for _ in range(5)]; b.record(); b.synchronize(); r.append(a.elapsed_time(b) / 5)
                    ts.append(statistics.median(r))
                base = base or ts; line.append(f"{n} {base[0]/ts[0]:.2f}/{base[1]/ts[1]:.2f}")
            print("SPEED vs none (fwd/bwd) d", d, "causal", c, *line, flush=True)
