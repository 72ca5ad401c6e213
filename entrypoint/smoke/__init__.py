"""The smoke tests: one module a check, run against the real port before the gate opens.

``python -m entrypoint.smoke PLAN.json VERDICT.json``
"""
