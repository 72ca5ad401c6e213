from __future__ import annotations

from entrypoint.smoke.counters import PREFIX_HITS, REQUESTS, parse

TEXT = """\
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a {b} \\"c\\""} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="a"} 3.0
vllm:request_success_total{engine="11",finished_reason="stop",model_name="a"} 7.0
vllm:prefix_cache_hits_total{model_name="a",engine="1"} 1.2188e+04
process_cpu_seconds_total 3.5
"""


def test_a_family_is_summed_over_its_other_labels() -> None:
    counters = parse(TEXT)
    assert (counters.value(REQUESTS, 0), counters.value(REQUESTS, 11)) == (5.0, 7.0)


def test_the_engine_label_may_stand_anywhere() -> None:
    assert parse(TEXT).value(PREFIX_HITS, 1) == 12188.0


def test_a_family_that_is_not_there_has_not_moved() -> None:
    assert parse(TEXT).moved(parse(""), "vllm:unknown_total", 0) == 0


def test_a_server_without_counters_is_known_as_such() -> None:
    assert not parse("process_cpu_seconds_total 3.5\n")
    assert parse(TEXT)
