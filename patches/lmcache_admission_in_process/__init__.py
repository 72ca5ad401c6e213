"""What LMCache's in-process connector keeps on disk or elsewhere comes back bit for bit, or is computed anew."""

from patches.framework.records import Patch, Role, Target

_HERE = "patches.lmcache_admission_in_process"
_BACKENDS = "lmcache.v1.storage_backend"
_DISK = f"{_BACKENDS}.local_disk_backend"
_LM = f"{_BACKENDS}.connector.lm_connector"
_CPU = f"{_BACKENDS}.local_cpu_backend"

PATCH = Patch(
    id="lmcache_admission_in_process",
    purpose="Objects of in-process tiers carry key, layout, fingerprint and checksum; what differs is computed.",
    fault="Readers trust the shape and dtype that they find and ignore short reads; engines in one folder overwrite"
    " each other; int8 and FNUZ KV is never stored; lm:// mixes the answers of two look-ups.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(_CPU, "LocalCPUBackend.allocate", f"{_HERE}.objects:allocate"),
        Target(_CPU, "LocalCPUBackend.batched_allocate", f"{_HERE}.objects:batched_allocate"),
        Target(_DISK, "LocalDiskBackend._key_to_path", f"{_HERE}.disk:key_to_path"),
        Target(_DISK, "LocalDiskBackend.async_save_bytes_to_disk", f"{_HERE}.disk:save"),
        Target(_DISK, "LocalDiskBackend._load_chunk_into_memory", f"{_HERE}.disk:load_into"),
        Target(_DISK, "LocalDiskBackend.load_bytes_from_disk", f"{_HERE}.disk:load"),
        Target(_DISK, "LocalDiskBackend.batched_async_load_bytes_from_disk", f"{_HERE}.disk:load_batch"),
        Target(_BACKENDS, "CreateStorageBackends", f"{_HERE}.remote:create_backends"),
        Target(f"{_BACKENDS}.connector", "CreateConnector", f"{_HERE}.remote:create_connector"),
        Target(f"{_BACKENDS}.naive_serde", "CreateSerde", f"{_HERE}.remote:create_serde"),
        Target(
            f"{_BACKENDS}.connector.fs_connector",
            "FSConnector._get_file_and_tmp_path",
            "patches.lmcache_admission.wrappers:file_and_temporary",
            reviewed=("FSConnector",),
        ),
        Target(
            f"{_BACKENDS}.native_clients.resp_client",
            "LMCacheRedisClient",
            f"{_HERE}.remote:redis_client",
            reviewed=("RESPClient",),
        ),
        Target(_LM, "LMCServerConnector.get", f"{_HERE}.lm:get", reviewed=("LMCServerConnector",)),
        Target(_LM, "LMCServerConnector.exists", f"{_HERE}.lm:exists"),
        Target(_LM, "LMCServerConnector.put", f"{_HERE}.lm:put"),
        Target("lmcache.v1.protocol", "RemoteMetadata.serialize", f"{_HERE}.protocol:serialize"),
    ),
    roles=frozenset({Role.ENGINE_CORE, Role.WORKER}),
    upstream=("LMCache#2517",),
    retires="LMCache checks what it loads against a checksum and the layout it expects.",
    exercised_by="every object that the in-process connector allocates, stores or loads",
    unexercised="The smoke tests move nothing through LMCacheConnectorV1, which is for servers that accept its limits.",
)
