"""LMCache works as it was asked to, or not at all: no start without a cache, no slow stand-ins on a GPU."""

from patches.framework.records import Patch, Role, Target

_WRAPPERS = "patches.lmcache_whole.wrappers"
_MANAGER = "lmcache.v1.manager"

PATCH = Patch(
    id="lmcache_whole",
    purpose="An LMCache that can't start, or finds no operations for its GPU, ends the start instead of a log line.",
    fault="In-process LMCache that fails to start logs 'degraded mode (recompute)' and caches nothing from then on;"
    " without its compiled operations a GPU's KV goes through slow ones in Python, with a warning.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(_MANAGER, "LMCacheManager.__init__", f"{_WRAPPERS}:init"),
        Target(_MANAGER, "LMCacheManager._handle_post_init_failure", f"{_WRAPPERS}:handle_post_init_failure"),
        Target(
            "lmcache.v1.platform.devices.cuda.device_ops",
            "CudaDeviceOps.ensure_native",
            f"{_WRAPPERS}:ensure_native",
        ),
    ),
    roles=frozenset({Role.ENGINE_CORE, Role.WORKER, Role.LMCACHE_SERVER}),
    retires="LMCache ends where it can't do what it was configured for.",
    exercised_by="the start of an in-process LMCache; the first operation on a GPU",
    unexercised="It speaks up where a start fails; the smoke tests make none fail.",
)
