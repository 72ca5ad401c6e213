"""What a tier with seals leaves to the tier that it wraps."""
# ruff: noqa: D102  # LMCache's interface says what its methods are for

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

__all__ = ["Delegating"]


class Delegating(L2AdapterInterface):  # type: ignore[misc]
    """Looks up, deletes, lists and counts in ``inner``.

    Args:
        inner: LMCache's adapter of the tier.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner_adapter = inner

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self.inner_adapter.get_lookup_and_lock_event_fd())

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        return int(self.inner_adapter.submit_lookup_and_lock_task(keys, group_layout_descs))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self.inner_adapter.query_lookup_and_lock_result(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        self.inner_adapter.submit_unlock(keys)

    @property
    def supports_global_eviction(self) -> bool:
        return bool(self.inner_adapter.supports_global_eviction)

    def get_usage(self) -> Any:
        return self.inner_adapter.get_usage()

    def delete(self, keys: list[Any]) -> None:
        self.inner_adapter.delete(keys)

    def list_l2_keys(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner_adapter.list_l2_keys(*args, **kwargs)

    def register_listener(self, listener: Any) -> None:
        self.inner_adapter.register_listener(listener)

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        self.inner_adapter.set_backend_identity(name, shared)

    def report_status(self) -> dict[str, Any]:
        return {**self.inner_adapter.report_status(), "sealed": True}
