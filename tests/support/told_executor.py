"""The engine's side of workers that do not exist: an executor of vLLM's that answers what a test told it."""

from __future__ import annotations

from typing import Any

__all__ = ["told_executor"]


def told_executor(config: Any, memory: list[int], **answers: list[Any]) -> Any:
    """An executor over ``len(memory)`` workers; ``allocated`` is the blocks that they were told to allocate.

    Args:
        config: vLLM's ``VllmConfig``.
        memory: Bytes that each worker has for its KV cache.
        answers: What the workers answer to other methods, by name; nothing to those that are not named.
    """
    from vllm.v1.executor.abstract import Executor

    answers["determine_available_memory"] = list(memory)

    class Told(Executor):  # type: ignore[misc]
        allocated: list[int]

        def __init__(self) -> None:
            self.vllm_config = config

        def _init_executor(self) -> None: ...

        def check_health(self) -> None: ...

        def collective_rpc(self, method: str, *_: Any, args: tuple[Any, ...] = (), **__: Any) -> Any:
            if method == "initialize_from_config":
                self.allocated = [found.num_blocks for found in args[0]]
            return answers.get(method, [])

    return Told()
