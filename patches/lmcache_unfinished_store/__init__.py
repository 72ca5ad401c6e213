"""A store that a worker prepared and never finished does not become cache content when the worker goes."""

from patches.framework.records import Patch, Role, Target

_MODULE = "lmcache.v1.multiprocess.modules.engine_driven_transfer"

PATCH = Patch(
    id="lmcache_unfinished_store",
    purpose="The LMCache server drops unfinished stores of a worker that goes, instead of publishing them.",
    fault="In engine_driven mode with shared memory, a worker that dies, is reaped or unregisters between preparing a"
    " store and finishing it leaves a slot with whatever was in it; the server then publishes the slot as valid KV.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(
            _MODULE,
            "EngineDrivenTransferModule._release_entry",
            "patches.lmcache_unfinished_store.wrappers:release_entry",
        ),
    ),
    roles=frozenset({Role.LMCACHE_SERVER}),
    retires="LMCache discards pending writes when it releases an instance.",
    exercised_by="the end of a worker, or its silence beyond the reap time",
    unexercised="A worker would have to end while it stores.",
)
