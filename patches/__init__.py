"""The catalogue: every patch, in the order in which it is applied and reported.

Only names stand here, so that a process that is neither vLLM's nor LMCache's pays next to nothing;
:func:`catalogue` loads the records.
"""

from __future__ import annotations

# typing itself would cost every Python process of the environment some milliseconds
TYPE_CHECKING = False
if TYPE_CHECKING:
    from patches.framework.records import Patch

__all__ = ["PATCH_IDS", "__version__", "catalogue"]

__version__ = "0.1.0"

PATCH_IDS = (
    "process_roster",
    "lmcache_roster",
    "serving_gate",
    "graceful_drain",
    "kv_probe",
    "patch_identity",
    "kv_budget",
    "cpu_amx_permission",
    "cpu_expert_parallel",
    "moriio_dp_rank",
    "startup_plan_rank",
    "lmcache_availability",
    "kv_load_recompute",
    "lmcache_unfinished_store",
    "lmcache_failed_transfer",
    "lmcache_failed_load",
    "lmcache_client_params",
    "lmcache_in_process",
    "lmcache_whole",
    "mla_kv_spec",
    "turboquant_kv_spec",
    "profile_routing",
    "dummy_token_routing",
    "kv_null_block",
    "kv_profile",
    "lmcache_identity",
    "lmcache_admission",
    "lmcache_admission_in_process",
    "lmcache_exact_transfer",
    "profiling_neighbour",
    "kv_override_check",
)


def catalogue() -> tuple[Patch, ...]:
    """Every patch record, in catalogue order."""
    from importlib import import_module

    return tuple(import_module(f"patches.{patch_id}").PATCH for patch_id in PATCH_IDS)
