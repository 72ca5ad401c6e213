"""All rules, by topic."""

from entrypoint.doctor.rule import Rule
from entrypoint.doctor.rules import cpu, kv_dtype, kv_startup, lmcache, parallel, reach, serving

__all__ = ["RULES", "TOPICS"]

RULES: tuple[Rule, ...] = (
    *reach.RULES,
    *serving.RULES,
    *parallel.RULES,
    *kv_startup.RULES,
    *kv_dtype.RULES,
    *lmcache.RULES,
    *cpu.RULES,
)
TOPICS = tuple(dict.fromkeys(rule.topic for rule in RULES))
