"""The model list names the model that clients will ask for."""

from __future__ import annotations

import time

import openai

from entrypoint.smoke.check import Check, CheckFailedError, Context, Evidence, always

__all__ = ["CHECK"]

LISTEN_TIMEOUT_S = 15.0


def _names(context: Context) -> list[str]:
    """The served names; waits for the port, which may begin to listen a moment after the plan was written."""
    deadline = time.monotonic() + LISTEN_TIMEOUT_S
    while time.monotonic() < deadline and not _listening(context):
        time.sleep(0.05)
    return [model.id for model in context.server.openai.models.list()]


def _listening(context: Context) -> bool:
    try:
        context.server.openai.models.list()
    except openai.APIConnectionError:
        return False
    return True


def run(context: Context) -> Evidence:
    names = _names(context)
    if context.plan.model not in names:
        raise CheckFailedError(
            f"the models {', '.join(names) or '(none)'}",
            f"{context.plan.model} among them",
            "Another server may be listening on this port, or --served-model-name changed on the way.",
        )
    return {"models": names}


CHECK = Check("models", "The model list names the served model.", always, run)
