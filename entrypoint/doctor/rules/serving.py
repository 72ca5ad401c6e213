"""What clients and operators meet while it serves and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.doctor.rule import NOTE, REFUSE, WARN, Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from entrypoint.doctor.reading import Reading

__all__ = ["RULES"]

TOPIC = "Serving"
_REVIEWED = ("lmcache.integration.vllm.", "vllm.")


def _joined_config(reading: Reading) -> str | None:
    return next((word for word in reading.subject.arguments.words if word.startswith("--config=")), None)


def _abrupt_end(reading: Reading) -> str | None:
    if reading.on("headless") or reading.number("shutdown_timeout") > 0:
        return None
    return "--shutdown-timeout 0" + ("" if reading.subject.arguments.has("--shutdown-timeout") else ", the default")


def _switched_on(name: str, *, several_servers: bool = False) -> Callable[[Reading], str | None]:
    def found(reading: Reading) -> str | None:
        if not reading.variable_on(name) or (several_servers and _api_servers(reading) == 1):
            return None
        return f"{name}={reading.variable(name)}"

    return found


def _api_servers(reading: Reading) -> int:
    given = reading.number("api_server_count")
    balanced_outside = reading.on("data_parallel_external_lb") or reading.value("data_parallel_rank") is not None
    return given or (1 if balanced_outside else reading.dp)


def _open_doors(reading: Reading) -> str | None:
    return "--api-key" if reading.value("api_key") or reading.variable("VLLM_API_KEY") else None


def _uncounted(reading: Reading) -> str | None:
    return "--disable-log-stats" if reading.on("disable_log_stats") else None


def _headless(reading: Reading) -> str | None:
    return "--headless" if reading.on("headless") else None


def _foreign_connector(reading: Reading) -> str | None:
    path = str(reading.transfer.get("kv_connector_module_path") or "")
    return f"kv_connector_module_path {path}" if path and not path.startswith(_REVIEWED) else None


RULES = (
    Rule(
        id="config-joined",
        level=REFUSE,
        topic=TOPIC,
        what="vLLM reads a --config file only where the path is a word of its own; joined with = it ignores the file.",
        why="The server starts with defaults, of the model too, and nothing says so.",
        change="Write --config FILE, without the equals sign.",
        found=_joined_config,
    ),
    Rule(
        id="abrupt-end",
        level=WARN,
        topic=TOPIC,
        what="Requests in flight are cut off when the server is told to end.",
        why="Every roll-out and every scale-down breaks the streams of that moment.",
        change="Give --shutdown-timeout the seconds that long answers take, and the container's grace period more.",
        found=_abrupt_end,
        patch="graceful_drain",
        upstream=("vllm#43208",),
        vllm=">=0.18",
    ),
    Rule(
        id="dev-mode",
        level=WARN,
        topic=TOPIC,
        what="VLLM_SERVER_DEV_MODE adds routes that run commands on the workers and reset caches.",
        why="They need no API key: whoever reaches the port can use them.",
        change="Unset it where others reach the server.",
        found=_switched_on("VLLM_SERVER_DEV_MODE"),
    ),
    Rule(
        id="insecure-serialisation",
        level=WARN,
        topic=TOPIC,
        what="VLLM_ALLOW_INSECURE_SERIALIZATION lets processes exchange pickled functions.",
        why="What reaches an engine's sockets can run code in it.",
        change="Unset it in production.",
        found=_switched_on("VLLM_ALLOW_INSECURE_SERIALIZATION"),
    ),
    Rule(
        id="lora-updates-several-servers",
        level=REFUSE,
        topic=TOPIC,
        what="LoRA adapters can't be loaded at run time where there are several API servers.",
        why="vLLM stops at start; with data parallelism it starts one API server a rank unless told.",
        change="Give --api-server-count 1, or unset VLLM_ALLOW_RUNTIME_LORA_UPDATING.",
        found=_switched_on("VLLM_ALLOW_RUNTIME_LORA_UPDATING", several_servers=True),
    ),
    Rule(
        id="api-key-paths",
        level=NOTE,
        topic=TOPIC,
        what="The API key guards only paths like /v1; /metrics, /health, /invocations and middleware paths are open.",
        why="/invocations answers prompts like /v1 does.",
        change="Put a proxy in front that lets only the guarded paths through.",
        found=_open_doors,
    ),
    Rule(
        id="uncounted",
        level=NOTE,
        topic=TOPIC,
        what="Without statistics nobody counts cache hits and ranks.",
        why="The smoke tests compare answers all the same, but can't prove that a hit was one; the verdict says so.",
        change="Leave --disable-log-stats out.",
        found=_uncounted,
    ),
    Rule(
        id="headless",
        level=NOTE,
        topic=TOPIC,
        what="A headless node has no HTTP side and so no gate of its own.",
        why="Its processes prove their patches when they start; the node that serves proves the answers.",
        change="Nothing; watch the readiness of the serving node.",
        found=_headless,
    ),
    Rule(
        id="connector-from-elsewhere",
        level=WARN,
        topic=TOPIC,
        what="The KV connector's class comes from a module that nobody reviewed here.",
        why="kv_connector_module_path goes before vLLM's own registry: our patches of connectors may not touch it.",
        change="Leave kv_connector_module_path out, or prove hits against cold answers yourself.",
        found=_foreign_connector,
    ),
)
