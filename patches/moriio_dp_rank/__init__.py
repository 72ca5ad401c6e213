"""MoRIIO's READ mode reads DP rank 0 of the prefill side, whichever rank has the KV."""

from patches.framework.records import Patch, Role, Target

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector"
_WRAPPERS = "patches.moriio_dp_rank.wrappers"

PATCH = Patch(
    id="moriio_dp_rank",
    purpose="MoRIIO READ never loads KV of a wrong prefill rank: data-parallel prefill is refused, such loads are"
    " recomputed.",
    fault="In READ mode a decode engine reads the prefill's DP rank 0, whichever rank has the KV of the prompt:"
    " foreign KV, reads beyond the pool where rank 0 has fewer blocks, and prefill blocks that are not released.",
    library="vllm",
    releases=">=0.19,<0.27",
    targets=(
        Target(
            _CONNECTOR,
            "MoRIIOConnector.__init__",
            f"{_WRAPPERS}:connector",
            reviewed=(
                "MoRIIOConnector.__init__",
                "MoRIIOConnectorWorker._read_blocks",
                "MoRIIOConnectorWorker._read_blocks_for_req",
                "MoRIIOConnectorWorker.get_engine_name_with_dp",
            ),
        ),
        Target(
            _CONNECTOR,
            "MoRIIOConnectorScheduler.get_num_new_matched_tokens",
            f"{_WRAPPERS}:matched_tokens",
            reviewed=(
                "MoRIIOConnectorScheduler.get_num_new_matched_tokens",
                "MoRIIOConnectorScheduler.update_state_after_alloc",
                "MoRIIOConnectorScheduler.request_finished",
            ),
        ),
    ),
    roles=frozenset({Role.ENGINE_CORE, Role.WORKER}),
    upstream=("vllm#46106", "vllm#46107", "vllm#46116"),
    retires="vLLM 0.27 reads the rank that the router names (vllm#46116).",
    exercised_by="the start of a MoRIIO connector, and each prompt whose KV a decode engine is to read",
    unexercised="It is for releases before those that the smoke tests have been run on.",
)
