"""A dead, silent or wrongly started LMCache server costs cache hits, never requests."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_QUEUE = "lmcache.v1.multiprocess.transport.zmq_impl.mq"
_FUTURES = "lmcache.v1.multiprocess.futures"
_TRANSFER = "lmcache.v1.multiprocess.transfer_context.worker_transfer"
_ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"
_CONNECTION = "patches.lmcache_availability.connection"
_HEARTBEAT = "patches.lmcache_availability.heartbeat"
_START = "patches.lmcache_availability.start"
_WORKER = "patches.lmcache_availability.worker"
_MOVED = frozenset({Feature.LMCACHE, Feature.PROBED})

PATCH = Patch(
    id="lmcache_availability",
    purpose="A dead or silent LMCache server costs hits, not requests; a wrongly started one is refused in seconds.",
    fault="With the LMCache server killed, every request hangs for up to 300 s while /health says 200; a server started"
    " in the wrong transfer mode, or none at all, holds the start of the engine for as long.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(
            _QUEUE,
            "MessageQueueClient.submit_request",
            f"{_CONNECTION}:submit_request",
            reviewed=("MessageQueueClient", "ClientPollingLoop"),
        ),
        Target(_QUEUE, "MessageQueueClient.cancel_streams", f"{_CONNECTION}:cancel_streams"),
        Target(_QUEUE, "MessageQueueClient.close", f"{_CONNECTION}:close"),
        Target(_FUTURES, "MessagingFuture.query", f"{_CONNECTION}:query"),
        Target(_FUTURES, "MessagingFuture.wait", f"{_CONNECTION}:wait"),
        Target(_ADAPTER, "send_ping", f"{_HEARTBEAT}:send_ping"),
        Target(_ADAPTER, "HeartbeatThread.__init__", f"{_HEARTBEAT}:init"),
        Target(_ADAPTER, "HeartbeatThread._execute", f"{_HEARTBEAT}:execute"),
        Target(_ADAPTER, "get_lmcache_chunk_size", f"{_START}:get_lmcache_chunk_size"),
        Target(
            _ADAPTER,
            "LMCacheMPSchedulerAdapter.__init__",
            f"{_START}:scheduler_adapter",
            reviewed=("LMCacheMPSchedulerAdapter",),
        ),
        Target(
            _ADAPTER,
            "LMCacheMPSchedulerAdapter.maybe_submit_lookup_request",
            "patches.lmcache_availability.lookup:maybe_submit_lookup_request",
        ),
        Target(
            _ADAPTER,
            "LMCacheMPSchedulerAdapter.check_lookup_result",
            "patches.lmcache_availability.lookup:check_lookup_result",
        ),
        Target(
            _ADAPTER,
            "LMCacheMPWorkerAdapter.__init__",
            f"{_START}:worker_adapter",
            reviewed=("LMCacheMPWorkerAdapter",),
        ),
        Target(_TRANSFER, "TransferContext._submit_registration", f"{_START}:submit_registration"),
        Target(_ADAPTER, "LMCacheMPWorkerAdapter.submit_store_request", f"{_WORKER}:submit_store_request"),
        Target(_ADAPTER, "LMCacheMPWorkerAdapter.submit_retrieve_request", f"{_WORKER}:submit_retrieve_request"),
        Target(_ADAPTER, "LMCacheMPWorkerAdapter.handle_preemptions", f"{_WORKER}:handle_preemptions"),
        Target(_ADAPTER, "LMCacheMPWorkerAdapter.get_finished", f"{_WORKER}:poll"),
        Target(_ADAPTER, "LMCacheMPWorkerAdapter.get_finished_with_lazy_offload", f"{_WORKER}:poll"),
    ),
    roles=frozenset({Role.ENGINE_CORE, Role.WORKER}),
    retires="LMCache fails pending requests when the connection is lost and bounds every wait on an engine step.",
    exercised_by="every look-up, store and load; the smoke series with an external hit",
    exercises=(
        Exercise(Role.ENGINE_CORE, ("LMCacheMPSchedulerAdapter.__init__",), frozenset({Feature.LMCACHE})),
        Exercise(Role.WORKER, ("LMCacheMPWorkerAdapter.__init__",), frozenset({Feature.LMCACHE})),
        Exercise(Role.WORKER, ("LMCacheMPWorkerAdapter.submit_store_request",), _MOVED),
        Exercise(Role.WORKER, ("LMCacheMPWorkerAdapter.submit_retrieve_request",), _MOVED),
    ),
)
