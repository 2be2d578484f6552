# /// script
# requires-python = ">=3.12"
# dependencies = ["torch==2.15.0"]
# ///
"""Show that torch's CPU attention gives NaN for causal order with a scale of 0 or below.

Exit status 1: shown.
"""

import math
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def main() -> int:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 3, 8) for _ in range(3))
    shown = 0
    for scale in (-1.0, 0.0, 0.5):
        hidden = ~torch.ones(3, 3, dtype=torch.bool).tril()
        logits = (query.double() @ key.double().mT * scale).masked_fill(hidden, -math.inf)
        expected = logits.softmax(-1) @ value.double()
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
            wrong = not torch.allclose(out.double(), expected, atol=1e-5)
            shown += wrong
            print(f"scale={scale}, {backend.name}: off by {(out - expected).abs().max():.3g}")
    return int(shown > 0)


if __name__ == "__main__":
    sys.exit(main())
