"""Settings and fixtures that all tests share. Set before jax starts."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Most of the time here is compilation.
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
    ]
)

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Lets go of a file's compiled programs: a process can map only so many pieces of code."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data beside the repository."""
    if not SHARED.is_dir():
        pytest.skip("the folder ../shared with the reference data is not here")
    return SHARED
