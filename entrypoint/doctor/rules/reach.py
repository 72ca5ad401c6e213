"""What the patches do not reach, from the same table that refuses it at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.doctor.rule import REFUSE, WARN, Rule
from patches.framework import reach

if TYPE_CHECKING:
    from collections.abc import Callable

    from entrypoint.doctor.reading import Reading

__all__ = ["RULES"]

_WHY = "Faults that our patches hold come back there, and nothing proves that part of the server."


def _rule(switch: reach.Switch, kind: str, found: Callable[[Reading], bool]) -> Rule:
    return Rule(
        id=f"reach:{switch.name.lstrip('-')}",
        level=REFUSE,
        topic="Reach",
        what=f"{switch.name} {switch.why}.",
        why=_WHY,
        change=f"Remove the {kind}, or run stock with SPLINT_MODE=off.",
        found=lambda reading: switch.name if found(reading) else None,
    )


def _variable(switch: reach.Switch) -> Rule:
    return _rule(switch, "variable", lambda reading: reading.variable(switch.name) not in switch.off)


def _flag(switch: reach.Switch) -> Rule:
    dest = switch.name.lstrip("-").replace("-", "_")
    given = (switch.name, *switch.abbreviations)
    return _rule(switch, "flag", lambda reading: reading.on(dest) or any(map(reading.subject.arguments.has, given)))


def _setting(switch: reach.Switch) -> Rule:
    return _rule(switch, "setting", lambda reading: bool(reading.subject.arguments.extra_config.get(switch.name)))


def _plugin(reading: Reading) -> str | None:
    kept_out = reach.plugin_is_kept_out(reading.subject.environ)
    return f"VLLM_PLUGINS={reading.variable('VLLM_PLUGINS')}" if kept_out else None


RULES = (
    *map(_variable, reach.VARIABLES),
    *map(_flag, reach.FLAGS),
    *map(_setting, reach.CONNECTOR_SETTINGS),
    Rule(
        id="plugin-kept-out",
        level=WARN,
        topic="Reach",
        what=f"VLLM_PLUGINS is set and does not name {reach.PLUGIN}.",
        why="vLLM calls only the plugins that it names, and ours proves each process: plain vllm serve refuses then.",
        change=f"Add {reach.PLUGIN} to VLLM_PLUGINS (splint serve does), or unset it.",
        found=_plugin,
        upstream=("vllm#43987",),
    ),
)
