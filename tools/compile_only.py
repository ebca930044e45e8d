"""pytest -p compile_only: every call compiles its kernels, forward and backward, and skips the test there."""
import dataclasses, pytest
done = set()
def pytest_configure(config):
    from cupyflash.gpu import corridor, device
    from cupyflash.gpu.plan import plan
    from cupyflash.gpu.programs import program
    from cupyflash.gpu.source import generate
    current = {}
    real = corridor.Prepared.__init__
    def functions(chosen, ordinal):
        problem = current["problem"]; arch = device.current(ordinal)
        for back in (False, True):
            for det in (False, True) if back else (False,):
                try: p = plan(dataclasses.replace(problem, deterministic=det), arch, back, chosen.family)
                except Exception: continue
                key = hash(generate(p))
                if key not in done:
                    done.add(key)
                    program(p)
        pytest.skip("compiled")
    state = corridor.rules.state
    def patched(*a, **k):
        r = state(*a, **k); current["problem"] = r[0]; return r
    corridor.rules.state = patched
    corridor.functions = functions
