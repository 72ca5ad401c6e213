"""MoRIIO READ and data-parallel prefill, on the connectors of the releases that have the fault.

The RDMA library (mori) is not there: the scheduler's side runs whole, the worker's as far as the choice of the rank.
"""

from __future__ import annotations

from typing import Any

import pytest
from support import releases

pytest.importorskip("vllm")

CODE = """
import inspect, json, os
from vllm.config import DeviceConfig, KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_common as common, moriio_connector as moriio
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from patches.framework.errors import RefusedError

found = {}
extra = {"proxy_ip": "", "proxy_ping_port": 1, "http_port": 2, "host_ip": "127.0.0.1"}

def config(role, ranks, read=True):
    transfer = KVTransferConfig(
        kv_connector="MoRIIOConnector", kv_role=role,
        kv_connector_extra_config={**extra, "read_mode": str(read).lower()},
    )
    made = VllmConfig(device_config=DeviceConfig(device="cpu"), kv_transfer_config=transfer)
    made.parallel_config = ParallelConfig(data_parallel_size=ranks, data_parallel_rank=0)
    return made

def connector(role, ranks, read=True):
    os.environ["VLLM_MORIIO_CONNECTOR_READ_MODE"] = "1" if read else "0"
    return moriio.MoRIIOConnector(config(role, ranks, read), KVConnectorRole.SCHEDULER, None)

def refused(*given):
    try:
        connector(*given)
    except RefusedError as error:
        return str(error)
    return ""

found["producer READ, 8 ranks"] = refused("kv_producer", 8)
found["producer READ, 1 rank"] = refused("kv_producer", 1)
found["producer WRITE, 8 ranks"] = refused("kv_producer", 8, False)
found["consumer READ, 8 ranks"] = refused("kv_consumer", 8)
try:
    moriio.MoRIIOConnector(config("kv_producer", 8), KVConnectorRole.WORKER, None)
except RefusedError:
    found["before the worker looks for mori"] = True

class Blocks:
    def get_block_ids(self):
        return ([4, 5, 6],)

def request(**params):
    given = {"prompt_token_ids": list(range(40)), "sampling_params": SamplingParams(max_tokens=2),
             "pooling_params": None, "eos_token_id": None, "arrival_time": 0.0}
    known = inspect.signature(Request.__init__).parameters
    made = Request("r", **{name: value for name, value in given.items() if name in known})
    made.kv_transfer_params = {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_block_ids": [4, 5, 6],
        "remote_engine_id": "e", "remote_host": "h", "remote_port": 1, **params}
    return made

consumer = connector("kv_consumer", 1).connector_scheduler

def planned(ask, **params):
    asked = request(**params)
    matched = [ask(consumer, asked, 0) for _ in range(2)]
    consumer.update_state_after_alloc(asked, Blocks(), matched[0][0])
    reads = len(consumer._reqs_need_recv)
    consumer._reqs_need_recv.clear()
    return matched, reads

scheduler = moriio.MoRIIOConnectorScheduler
patched = scheduler.get_num_new_matched_tokens
for name, params in {
    "rank 3": {"remote_dp_rank": 3, "remote_dp_size": 8}, "rank unknown": {"remote_dp_size": 8},
    "rank 0": {"remote_dp_rank": 0, "remote_dp_size": 8}, "one rank": {"remote_dp_size": 1}, "nothing said": {},
}.items():
    found[name] = planned(patched, **params)
found["rank 3, stock"] = planned(patched.__wrapped__, remote_dp_rank=3, remote_dp_size=8)

worker = object.__new__(moriio.MoRIIOConnectorWorker)
worker.mode = common.MoRIIOMode.READ
class Asked(Exception): pass
def session(name):
    raise Asked(name)
worker._get_built_session = session
meta = common.MoRIIOConnectorMetadata()
address = "host:h,handshake:1,notify:2"
asked_for = f"___prefill_addr_{address}___decode_addr_{address}_{'0' * 32}"
meta.add_new_req(asked_for, [1], {
    "transfer_id": "t", "remote_block_ids": [1], "remote_engine_id": "e", "remote_host": "h", "remote_port": 1,
    "remote_handshake_port": 1, "remote_notify_port": 2, "tp_size": 1, "remote_dp_size": 8, "remote_dp_rank": 3})
(req,) = meta.reqs_to_recv.values()
req.remote_engine_id = "host:1"
try:
    worker._read_blocks_for_req("r", req)
except Asked as asked:
    found["read with rank 3 asked for"] = str(asked)
print(json.dumps(found))
"""


@pytest.fixture(
    params=[
        "0.25.1",
        *(pytest.param(other, marks=pytest.mark.full) for other in ("0.19.1", "0.22.1", "0.24.0", "0.25.0", "0.26.0")),
    ],
    scope="module",
)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    said: dict[str, Any] = releases.value(request.param, CODE, patches="moriio_dp_rank")
    return said


def test_data_parallel_prefill_is_refused_in_read_mode_and_only_there(found: dict[str, Any]) -> None:
    refusal = found["producer READ, 8 ranks"]
    assert "data_parallel_size 8" in refusal
    assert "7 of 8 ranks" in refusal
    assert "0.27" in refusal
    assert found["before the worker looks for mori"]
    assert not any(
        found[case] for case in ("producer READ, 1 rank", "producer WRITE, 8 ranks", "consumer READ, 8 ranks")
    )


def test_stock_plans_the_read_of_rank_3_and_asks_for_rank_0(found: dict[str, Any]) -> None:
    assert found["rank 3, stock"] == [[[39, False], [39, False]], 1]
    assert found["read with rank 3 asked for"] == "host:1_dp0"


@pytest.mark.parametrize("case", ["rank 3", "rank unknown"])
def test_a_load_from_another_or_an_unknown_rank_is_a_miss_however_often_it_is_asked_for(
    found: dict[str, Any], case: str
) -> None:
    assert found[case] == [[[0, False], [0, False]], 0]


@pytest.mark.parametrize("case", ["rank 0", "one rank", "nothing said"])
def test_a_load_from_rank_0_stays_what_it_is(found: dict[str, Any], case: str) -> None:
    assert found[case] == [[[39, False], [39, False]], 1]
