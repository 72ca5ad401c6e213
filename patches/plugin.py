"""The ``vllm.general_plugins`` entry point: verify this process, or raise.

vLLM logs and swallows an error in a plugin's import, but not one in its function: nothing here can fail before
:func:`verify` runs.
"""

__all__ = ["verify"]


def verify() -> None:
    """Prove that this process carries its patches. vLLM calls it in API servers, engine cores and workers.

    Raises:
        RefusedError: in enforce mode, where they are not all in place.
    """
    import os

    if os.environ.get("SPLINT_MODE") == "off":
        return
    from patches import bootstrap
    from patches.framework import hooks, process
    from patches.framework.errors import BootstrapError

    state = process.start()
    if not bootstrap.started():
        state.refuse(
            BootstrapError(
                "the start-up hooks did not run in this process",
                "the line of vllm_splint.pth at interpreter start",
                "Reinstall vllm-splint into this environment and start Python without -S or -I.",
            )
        )
    hooks.install("vllm")
    state.verify()
