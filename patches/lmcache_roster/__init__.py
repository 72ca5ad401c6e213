"""The LMCache server, a process without vLLM, attests its patches like every other."""

from patches.framework.records import Exercise, Patch, Role, Target

PATCH = Patch(
    id="lmcache_roster",
    purpose="The LMCache server attests its patches, in its run directory and to every engine that connects to it.",
    fault="Stock says nowhere which LMCache release and which patches a cache server runs with.",
    library="lmcache",
    releases=">=0.3",
    targets=(
        Target(
            "lmcache.v1.multiprocess.server", "run_cache_server", "patches.lmcache_roster.wrappers:run_cache_server"
        ),
        Target(
            "lmcache.v1.multiprocess.modules.management",
            "ManagementModule.get_experimental",
            "patches.lmcache_roster.wrappers:get_experimental",
            releases=">=0.5.6",
        ),
    ),
    roles=frozenset({Role.LMCACHE_SERVER}),
    retires="LMCache reports its release and active patches over its status API.",
    exercised_by="the start of the LMCache server",
    exercises=(Exercise(Role.LMCACHE_SERVER, ("run_cache_server",)),),
)
