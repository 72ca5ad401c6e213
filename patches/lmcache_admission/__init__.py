"""What an LMCache server keeps in its second level comes back bit for bit, or is a miss."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_WRAPPERS = "patches.lmcache_admission.wrappers"
_TIERS = "lmcache.v1.distributed.l2_adapters"
_MOVED = frozenset({Feature.LMCACHE, Feature.PROBED})

PATCH = Patch(
    id="lmcache_admission",
    purpose="Objects of a second-level tier carry key, layout, fingerprint and checksum; what differs is a miss.",
    fault="LMCache's file tiers keep bare bytes: a longer file, a damaged or exchanged one is taken for KV, and the"
    " model answers from it.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(
            "lmcache.v1.distributed.memory_manager.l1_memory_manager",
            "L1MemoryManager.allocate",
            f"{_WRAPPERS}:allocate",
        ),
        Target(_TIERS, "create_l2_adapter", f"{_WRAPPERS}:create_l2_adapter"),
        Target(
            f"{_TIERS}.fs_l2_adapter",
            "FSL2Adapter._key_to_file_and_tmp_path",
            f"{_WRAPPERS}:file_and_temporary",
            reviewed=("FSL2Adapter", "_object_key_to_filename"),
        ),
        Target(
            "lmcache.v1.multiprocess.engine_context",
            "LayoutDescRegistry.register",
            f"{_WRAPPERS}:register_layout",
            reviewed=("LayoutDescRegistry",),
        ),
    ),
    roles=frozenset({Role.LMCACHE_SERVER}),
    retires="LMCache checks what it loads against a checksum and the layout it expects.",
    exercised_by="every object that the LMCache server allocates, stores in its second level or loads from it",
    exercises=(Exercise(Role.LMCACHE_SERVER, ("L1MemoryManager.allocate",), _MOVED),),
)
