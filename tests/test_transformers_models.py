"""Model types of transformers: equal to eager attention or refused by name, as docs/transformers-models.md
lists them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import transformers_models as models

if f"transformers {transformers.__version__}," not in models.LISTED.read_text("utf-8"):
    pytest.skip(f"the list is not of transformers {transformers.__version__}", allow_module_level=True)
LISTED = models.listed()
# One of each way to ask for attention, and those that once were wrong without a word.
SAMPLE = [
    "clip", "deberta", "deepseek_v32", "deepseek_v4", "falcon", "gemma2", "gemma4_text", "glm_moe_dsa",
    "minimax_m3_vl_text",
    "modernbert", "nllb-moe", "vit",
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are faster so, and tests that run beside them too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(kind: str) -> None:
    listed = LISTED[kind]
    if listed == "not made":
        pytest.skip("no small model")
    found = models.judge(kind)
    if found.startswith("not made") and any(x in found for x in ("requires the", "needs a package")):
        pytest.skip(found)
    assert found == listed


@pytest.mark.parametrize("kind", SAMPLE)
def test_sample(kind: str) -> None:
    check(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(x for x, found in LISTED.items() if found != "not made"))
def test_every_kind(kind: str) -> None:
    check(kind)


def test_the_list_is_whole() -> None:
    assert sorted(LISTED) == models.kinds()
    for found in LISTED.values():
        assert found in ("equal", "no attention", "not made") or (
            found.startswith("refused: ") and found.endswith("; its attn_implementation must be 'eager'")
        )
    assert sum(x == "not made" for x in LISTED.values()) < 170


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = models.ours.api.attention
    monkeypatch.setattr(models.ours.api, "attention", lambda *a, **o: real(*a, **{**o, "scale": 0.26}))
    with pytest.raises(AssertionError, match="padded nowhere: .* off, of"):
        models.judge("llama")
