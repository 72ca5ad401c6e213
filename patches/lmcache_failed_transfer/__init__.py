"""A store or load that fails inside the LMCache server is answered, so that nobody waits for it for ever."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_MODULE = "lmcache.v1.multiprocess.modules.lmcache_driven_transfer"
_MOVED = frozenset({Feature.LMCACHE, Feature.PROBED, Feature.LMCACHE_DRIVEN})
_WRAPPERS = "patches.lmcache_failed_transfer.wrappers"

PATCH = Patch(
    id="lmcache_failed_transfer",
    purpose="The LMCache server answers a store or load that failed inside it: a lost store, a recomputed load.",
    fault="Where the server copies (lmcache_driven), an error in its handler is logged and never answered: the request"
    " waits for its load for ever, and blocks of stores are never given back.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(_MODULE, "LMCacheDrivenTransferModule.store", f"{_WRAPPERS}:answered"),
        Target(_MODULE, "LMCacheDrivenTransferModule.retrieve", f"{_WRAPPERS}:answered"),
    ),
    roles=frozenset({Role.LMCACHE_SERVER}),
    retires="LMCache answers a request whose handler failed.",
    exercised_by="every store and load of lmcache_driven mode",
    exercises=(
        Exercise(Role.LMCACHE_SERVER, ("LMCacheDrivenTransferModule.store",), _MOVED),
        Exercise(Role.LMCACHE_SERVER, ("LMCacheDrivenTransferModule.retrieve",), _MOVED),
    ),
)
