"""megamoe: distributed Mixture-of-Experts layers for PyTorch on NVIDIA Hopper, and on any Linux CPU.

Importing this package is cheap: no torch, no CUDA, no compile. Public names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS = {
    "BackendUnavailable": "megamoe.errors",
    "ConfigError": "megamoe.errors",
    "MegaMoETimeout": "megamoe.errors",
    "MegaMoeError": "megamoe.errors",
    "MoEConfig": "megamoe.config",
    "MoESpec": "megamoe.config",
    "MoEContext": "megamoe.functional",
    "mega_moe": "megamoe.functional",
    "ExpertWeights": "megamoe.kernels.weights",
    "Experts": "megamoe.layers.experts",
    "CompressedAttention": "megamoe.layers.compressed_attention",
    "Indexer": "megamoe.layers.indexer",
    "IndexerAttention": "megamoe.layers.indexer_attention",
    "MoELayer": "megamoe.layers.moe",
    "PagedCache": "megamoe.layers.paged_cache",
    "Router": "megamoe.layers.router",
    "sync_replicated_grads": "megamoe.layers.moe",
    "DeviceWorkspace": "megamoe.device_workspace",
    "SymmBuffer": "megamoe.mega",
    "destroy_localizer": "megamoe.mega",
    "fp8_fp4_mega_moe": "megamoe.mega",
    "get_symm_buffer_for_mega_moe": "megamoe.mega",
    "get_symm_buffer_size_for_mega_moe": "megamoe.mega",
    "localize": "megamoe.mega",
    "transform_weights_for_mega_moe": "megamoe.mega",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'megamoe' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
