"""Non-local means, a denoiser of images, for NumPy and CuPy arrays alike: what comes in decides where it runs, as in
cupyx.scipy.

A pixel becomes the mean of all pixels, weighted by how alike the patches around them are (Buades, Coll & Morel 2005):

    w_ij = exp(-|p_i - p_j|^2 / h^2) = exp(2 p_i . p_j / h^2 - |p_j|^2 / h^2) · what depends on i alone, and cancels

which is attention of patches to patches, with the pixels as values. Of n pixels the n x n weights are never in memory.

    python examples/non_local_means.py [--size N] [--device cpu|gpu] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from cupyflash import attention
from cupyflash.arrays import array_module, on_host

Array = Any


def get_array_module(x: Array) -> Any:
    """NumPy or CuPy, as cupyx.scipy.get_array_module says, without CuPy where there is none."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


def denoise(image: Array, h: float, radius: int = 2) -> Array:
    """The image (rows, columns, channels), its noise averaged away; h is how much patches may differ, for each number
    in them."""
    xp = get_array_module(image)
    side = 2 * radius + 1
    padded = xp.pad(image, ((radius, radius), (radius, radius), (0, 0)), mode="reflect")
    patches = xp.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(0, 1))
    p = patches.reshape(image.shape[0] * image.shape[1], -1)  # (pixels, numbers of a patch)
    q = xp.concatenate([p, xp.ones_like(p[:, :1])], axis=1)
    k = xp.concatenate([p, -0.5 * (p * p).sum(axis=1, keepdims=True)], axis=1)
    means = attention(q, k, image.reshape(-1, image.shape[2]), scale=2 / (h * h * p.shape[1]))
    return means.reshape(image.shape)


def picture(n: int) -> np.ndarray:
    """Rings, n x n, three channels of float32."""
    y, x = np.mgrid[:n, :n] * (10 / n)
    return np.stack([np.sin(x * y / c) > 0 for c in (3, 4, 6)], axis=-1).astype(np.float32)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=96, help="pixels of a side")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU if there is one")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the three images (needs matplotlib)")
    given = parser.parse_args(arguments)
    xp = array_module(given.device)
    clean = picture(given.size)
    noisy = clean + 0.3 * np.random.default_rng(0).standard_normal(clean.shape, dtype=np.float32)
    found = on_host(denoise(xp.asarray(noisy), h=0.3))
    errors = {name: float(np.sqrt(((x - clean) ** 2).mean())) for name, x in (("noisy", noisy), ("denoised", found))}
    print(f"{clean.size // 3:,} pixels on {xp.__name__}: error {errors['noisy']:.3f} -> {errors['denoised']:.3f}")
    if given.plot:
        plot(given.plot, {"the image": clean, "with noise": noisy, "denoised": found})
    return errors


def plot(path: str, images: dict[str, np.ndarray]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (name, image) in zip(figure.subplots(1, len(images)), images.items()):
        axes.imshow(image.clip(0, 1), interpolation="nearest")
        axes.set_title(name, fontsize=11)
        axes.axis("off")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
