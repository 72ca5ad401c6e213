"""Between a worker and its LMCache server bytes are copied, never numbers converted."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_CONTEXTS = "lmcache.v1.multiprocess.transfer_context"
_WRAPPERS = "patches.lmcache_exact_transfer.wrappers"

PATCH = Patch(
    id="lmcache_exact_transfer",
    purpose="A worker neither takes nor gives chunks of another dtype or shape than its KV cache has.",
    fault="In engine_driven mode the worker copies with a conversion of numbers where dtypes differ: a bfloat16 chunk"
    " becomes float16 values, a one-byte code becomes a number.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(
            f"{_CONTEXTS}.pickle",
            "EngineDrivenContextPickle.prepare_retrieve",
            f"{_WRAPPERS}:prepare_retrieve",
        ),
        Target(f"{_CONTEXTS}.pickle", "EngineDrivenContextPickle.commit_store", f"{_WRAPPERS}:commit_store"),
        Target(f"{_CONTEXTS}.shm", "EngineDrivenContextShm.prepare_retrieve", f"{_WRAPPERS}:prepare_retrieve"),
        Target(f"{_CONTEXTS}.shm", "EngineDrivenContextShm.prepare_store", f"{_WRAPPERS}:prepare_store"),
        Target(
            f"{_CONTEXTS}.worker_transfer",
            "EngineDrivenTransferContext.submit_store",
            f"{_WRAPPERS}:submit_store",
        ),
    ),
    roles=frozenset({Role.WORKER}),
    retires="LMCache refuses to copy between different dtypes.",
    exercised_by="every store and load of a worker in engine_driven mode",
    exercises=(
        # Every worker loads; of those that hold the same bytes (MLA) only one stores.
        Exercise(
            Role.WORKER,
            ("EngineDrivenContextPickle.prepare_retrieve", "EngineDrivenContextShm.prepare_retrieve"),
            frozenset({Feature.LMCACHE, Feature.PROBED, Feature.ENGINE_DRIVEN}),
        ),
    ),
)
