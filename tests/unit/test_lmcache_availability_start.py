"""What the start of an engine makes of its LMCache server, without one: why a registration was refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework import process
from patches.framework.errors import EnvironmentRefusedError, MismatchError
from patches.framework.records import Seam
from patches.lmcache_admission import refused, serdes, wrappers
from patches.lmcache_availability import protection, start
from patches.lmcache_availability.connection import link_of
from patches.lmcache_roster import attested

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning",  # LMCache's logging
)


def seam(original: Callable[..., Any]) -> Seam:
    return Seam("m:f", original, lambda: None)


class Answer:
    """An answer that has come, or one that never does."""

    def __init__(self, *said: Any) -> None:
        self.said = said

    def wait(self, *_: float) -> bool:
        return bool(self.said)

    def result(self, **_: float) -> Any:
        if not self.said:
            raise TimeoutError
        return self.said[0]


class Client:
    """A server's client; the server describes itself with the given facts, or not at all."""

    def __init__(self, facts: dict[str, Any] | None) -> None:
        self.facts = facts

    def get_chunk_size(self) -> Answer:
        return Answer(128)

    def get_experimental(self) -> Answer:
        return Answer() if self.facts is None else Answer(["named"])


@pytest.fixture
def registering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Client], str]:
    """Register where the server gives no answer to it; returns the refusal."""
    monkeypatch.setattr(attested, "SAID_ANEW_AFTER_S", 0.0)

    def refusal(client: Client) -> str:
        monkeypatch.setattr(attested, "in_answer", lambda _: {"facts": client.facts})
        link = link_of(client)
        link.url, link.block_tokens = "tcp://cache:5555", 128
        submit = start.submit_registration(seam(lambda *_: Answer()))
        with pytest.raises(EnvironmentRefusedError) as found:
            submit(SimpleNamespace(_req_client=client), lambda: None)
        return str(found.value)

    return refusal


def test_the_servers_own_reason_reaches_the_engine(registering: Callable[[Client], str]) -> None:
    said = registering(Client({refused.FACT: {"count": 1, "reason": "the lossy serde fp8"}}))
    assert "the last one that it refused was the lossy serde fp8" in said
    assert "--supported-transfer-mode" not in said


def test_a_reason_from_before_is_not_this_engines(registering: Callable[[Client], str]) -> None:
    client = Client({refused.FACT: {"count": 1, "reason": "the lossy serde fp8"}})
    link_of(client).server = {"facts": client.facts}
    said = registering(client)
    assert "the lossy serde fp8" not in said
    assert "transfer mode" in said


def test_a_server_that_says_no_reason_leaves_all_of_them(registering: Callable[[Client], str]) -> None:
    for client in (Client(None), Client({})):
        said = registering(client)
        assert all(cause in said for cause in ("transfer mode", "lossy serde", "layout", "its log"))


@pytest.mark.parametrize(
    "fact", [None, 3, {}, {"count": 1}, {"count": "1", "reason": "so"}, {"count": 1, "reason": None}]
)
def test_what_cant_be_read_is_no_reason(fact: Any) -> None:
    assert refused.said({refused.FACT: fact}) == (0, "")


def test_the_server_keeps_the_reason_of_each_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {}
    monkeypatch.setattr(process, "current", lambda: SimpleNamespace(facts=facts, note=lambda **new: facts.update(new)))
    monkeypatch.setattr(serdes, "_lossy", {"fp8"})
    monkeypatch.setattr(serdes, "_one_byte", set())
    register, registry = wrappers.register_layout(seam(lambda *_, **__: None)), SimpleNamespace()

    def layout(size: int) -> Any:
        return SimpleNamespace(shapes=[[size]], dtypes=[SimpleNamespace(itemsize=2 if size > 1 else 1)])

    register(registry, "name", 1, layout(2))
    assert refused.said(facts) == (0, "")
    with pytest.raises(MismatchError):
        register(registry, "name", 1, layout(3))
    assert refused.said(facts)[0] == 1
    assert "an engine that registers" in refused.said(facts)[1]
    with pytest.raises(EnvironmentRefusedError):
        register(registry, "other", 1, layout(1))
    assert refused.said(facts)[0] == 2
    assert "lossy serde fp8" in refused.said(facts)[1]


def test_one_that_does_not_say_who_it_is_is_known_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attested, "SAID_ANEW_AFTER_S", 0.0)
    client = Client(None)
    link = link_of(client)
    link.server = {"splint": "known"}
    protection.ask_again(client, link)
    assert link.server == {"splint": "known"}
