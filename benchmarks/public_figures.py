"""Published times of another mega-kernel, to hold ours against; they were not measured here.

DeepGEMM pull request 383 and the branch that retuned it for H200: FP8 weights, 8 H200 over NVLink, EP8, cold L2 by an
8 GB flush, the largest of all ranks, median of 20. Microseconds by tokens a rank.
"""

from __future__ import annotations

__all__ = ["PUBLIC", "PUBLIC_NAME"]

PUBLIC_NAME = "public FP8 mega-kernel, 8 GPUs"
PUBLIC = {
    "flash": {8: 223, 128: 265, 1024: 580, 2048: 954, 4096: 1727, 8192: 3176},
    "pro": {8: 637, 128: 872, 1024: 1366, 2048: 2305, 4096: 4095, 8192: 7735},
}
