"""Memory of the mega-kernel for the presets: python benchmarks/mega_moe_memory.py prints the table of docs/mega-moe.md.

Nothing is allocated and no GPU is needed; the sizes come from the layout that the kernel itself uses.
"""

from __future__ import annotations

import argparse
import dataclasses

from megamoe.config import MoEConfig, MoESpec, preset_names
from megamoe.device_workspace import DeviceWorkspace
from megamoe.kernels.packing.moe import packed_moe_bytes

__all__ = ["table"]

RANKS = 8
TOKENS = (256, 1024, 8192)
MIB = 1 << 20


def table() -> str:
    """Return the table, Markdown."""
    head = ["preset", "experts a rank", "packed weights of a layer"]
    rows = [[*head, *(f"workspace, {tokens} tokens" for tokens in TOKENS)], ["---"] * (len(head) + len(TOKENS))]
    for name in preset_names():
        spec = _as_mxfp4(MoEConfig.from_yaml(name).spec)
        if spec.num_experts % RANKS or spec.hidden % 32 or name == "quickstart":
            continue
        local = spec.num_experts // RANKS
        packed = local * packed_moe_bytes(spec.hidden, spec.intermediate)
        sizes = [DeviceWorkspace.bytes_for([spec], world_size=RANKS, max_tokens_per_rank=tokens) for tokens in TOKENS]
        rows.append([f"`{name}`", str(local), *(f"{size / MIB:.0f}" for size in (packed, *sizes))])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _as_mxfp4(spec: MoESpec) -> MoESpec:
    return dataclasses.replace(spec, weight_format="mxfp4", act_scale="token")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"MiB on each of {RANKS} ranks")
    print(table())
