"""The MEGAMOE_JIT_* environment variables as one value."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from megamoe import env

__all__ = ["JitSettings", "default_cache_dirs"]


def default_cache_dirs() -> tuple[Path, ...]:
    """Return the cache folders to search, in order; see MEGAMOE_CACHE_DIR.

    Unset, it is `~/.cache/megamoe`, then a folder of this user in the system's temporary folder, so that a missing or
    read-only home works.
    """
    text = env.value("MEGAMOE_CACHE_DIR")
    if text:
        return tuple(Path(part).expanduser() for part in text.split(":") if part)
    fallback = Path(tempfile.gettempdir()) / f"megamoe-{env.user_id()}"
    home = env.home()
    return (fallback,) if home is None else (home / ".cache" / "megamoe", fallback)


@dataclass(frozen=True)
class JitSettings:
    """How to compile. Everything that changes the cubin is part of the cache key; the rest only prints or checks."""

    compiler: str = "nvrtc"
    cpp_standard: int = 20
    lineinfo: bool = False
    check: bool = False
    debug: bool = False
    print_command: bool = False
    print_load_time: bool = False
    ptxas_verbose: bool = False
    dump_ptx: bool = False
    dump_sass: bool = False
    cache_dirs: tuple[Path, ...] = field(default_factory=default_cache_dirs)
    lock_timeout_s: float = 600.0

    @classmethod
    def from_env(cls) -> JitSettings:
        """Read the settings from the environment.

        Raises:
            ValueError: MEGAMOE_JIT_CPP_STANDARD is no number.
        """
        standard = env.value("MEGAMOE_JIT_CPP_STANDARD")
        if not standard.isdigit():
            raise ValueError(f"MEGAMOE_JIT_CPP_STANDARD must be a number such as 20, got '{standard}'")
        dump_asm = env.flag("MEGAMOE_JIT_DUMP_ASM")
        return cls(
            compiler=env.value("MEGAMOE_JIT_COMPILER"),
            cpp_standard=int(standard),
            lineinfo=env.flag("MEGAMOE_JIT_WITH_LINEINFO"),
            check=env.flag("MEGAMOE_JIT_PTXAS_CHECK"),
            debug=env.flag("MEGAMOE_JIT_DEBUG"),
            print_command=env.flag("MEGAMOE_JIT_PRINT_COMPILER_COMMAND"),
            print_load_time=env.flag("MEGAMOE_JIT_PRINT_LOAD_TIME"),
            ptxas_verbose=env.flag("MEGAMOE_JIT_PTXAS_VERBOSE"),
            dump_ptx=dump_asm or env.flag("MEGAMOE_JIT_DUMP_PTX"),
            dump_sass=dump_asm or env.flag("MEGAMOE_JIT_DUMP_SASS"),
        )
