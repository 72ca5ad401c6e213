"""The connection to the server under test: the OpenAI SDK and plain HTTP over one transport.

The secret sits in the transport's headers and nowhere else: the SDK's debug log prints request options, but not those.
"""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING, Any, cast

import httpx
import openai

from entrypoint.smoke.counters import Counters, parse
from patches.serving_gate.plan import CONTROL_PREFIX, SMOKE_HEADER, SmokePlan

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RANK_HEADER", "Server", "tls_context"]

COUNTED_WITHIN_S = 5.0
RANK_HEADER = "X-data-parallel-rank"

# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the ssl module does not name.
_NO_CHECK_TIME = 0x200000


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Trust exactly the certificates in ``ca_file``, whatever their host name and age.

    The server is reached by its loopback address, which its certificate does not name. That the peer holds the
    key of that very certificate is what matters here, not whether clients elsewhere would still accept it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cafile=ca_file)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    return context


def _transport(plan: SmokePlan) -> httpx.HTTPTransport:
    # Reading the system's certificates takes 0.1 s, which a plain connection need not pay.
    verify: ssl.SSLContext | bool = tls_context(plan.ca_file) if plan.ca_file else plan.base_url.startswith("https:")
    return httpx.HTTPTransport(verify=verify, uds=plan.uds, retries=0)


class Server:
    """A server that answers the OpenAI API, and its metrics.

    Attributes:
        model: The served name to ask for.
        extensions: Whether it has vLLM's additions to the API.
        top: How many alternatives a token to ask for; lowered where the server allows fewer (``--max-logprobs``).
    """

    def __init__(self, plan: SmokePlan) -> None:
        self._base_url = plan.base_url.rstrip("/")
        self.model = plan.model
        self.top = 20
        self.extensions = plan.extensions
        authorization = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
        self.http = httpx.Client(
            transport=_transport(plan),
            headers={SMOKE_HEADER: plan.secret, **authorization} if plan.secret else authorization,
            timeout=plan.timeout_s,
            trust_env=False,
        )
        self.openai = openai.OpenAI(
            base_url=f"{self._base_url}/v1",
            api_key=plan.api_key or "none",
            max_retries=0,
            timeout=plan.timeout_s,
            http_client=cast("Any", self.http),
        )

    def close(self) -> None:
        """Give up the connections."""
        self.http.close()

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """POST JSON to a path below the base URL; the caller judges the status."""
        return self.http.post(f"{self._base_url}{path}", json=body or {})

    def counters(self) -> Counters:
        """The server's ``/metrics``, parsed."""
        response = self.http.get(f"{self._base_url}/metrics")
        return parse(response.raise_for_status().text)

    def counters_once(self, arrived: Callable[[Counters], bool]) -> Counters:
        """Read the counters until ``arrived`` says that they tell of the last request, or time is up.

        vLLM answers a request before it counts it, so the first reading may be too early.
        """
        deadline = time.monotonic() + COUNTED_WITHIN_S
        while True:
            counters = self.counters()
            if arrived(counters) or time.monotonic() > deadline:
                return counters
            time.sleep(0.02)

    def control(self, name: str) -> list[dict[str, Any]]:
        """What each engine answers to a probe, once none of them has requests. Only the closed gate offers this.

        Raises:
            httpx.HTTPStatusError: the gate has no such call, or an engine could not carry it out.
        """
        deadline = time.monotonic() + COUNTED_WITHIN_S
        while True:
            answers = self.post(f"{CONTROL_PREFIX}/{name}").raise_for_status().json()["engines"]
            engines: list[dict[str, Any]] = sorted(answers, key=lambda answer: int(answer["dp_rank"]))
            if not any("busy" in engine for engine in engines) or time.monotonic() > deadline:
                return engines
            time.sleep(0.05)

    def reset_prefix_cache(self) -> bool:
        """Empty the engines' own prefix caches; what LMCache holds stays. Only the closed gate offers this."""
        response = self.post(f"{CONTROL_PREFIX}/reset_prefix_cache")
        return response.status_code == httpx.codes.OK and bool(response.json().get("reset"))
