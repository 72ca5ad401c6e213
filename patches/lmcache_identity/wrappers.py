"""LMCache's own seams: what makes keys gets the fingerprint, what makes requests gets adapter and salt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from patches.framework import process
from patches.framework.errors import MismatchError, ProfileError
from patches.framework.records import Seam
from patches.lmcache_identity.adapters import adapter_identity
from patches.lmcache_identity.carrying import carried, missing, published
from patches.lmcache_identity.namespaces import salt_for, tagged
from patches.lmcache_identity.profile import KVCacheProfile, key_name
from patches.lmcache_identity.tensors import check_tensors

__all__ = [
    "get_dcp_decorated_model_name",
    "get_num_new_matched_tokens",
    "new_in_process_request",
    "on_new_request",
    "register_in_process",
    "register_kv_caches",
    "request_tracker",
    "token_database",
]


def get_dcp_decorated_model_name(seam: Seam) -> Callable[..., str]:
    """The name under which scheduler and worker register, look up, store and load in the LMCache server."""
    original = seam.original

    @wraps(original)
    def decorated(vllm_config: Any, kv_cache_config: Any = None) -> str:
        seam.count()
        name: str = original(vllm_config, kv_cache_config)
        profile = carried(kv_cache_config)
        if profile is None:
            process.refuse(missing("the keys of the LMCache server"))
            return name
        return key_name(name, profile.fingerprint)

    return decorated


def request_tracker(seam: Seam) -> Callable[..., None]:
    """A request's adapter goes into its salt; one without an identity of its own bypasses the cache."""
    original = seam.original

    @wraps(original)
    def init(self: Any, request: Any) -> None:
        seam.count()
        original(self, request)
        if request.lora_request is None and not _has_embeddings(request) and not self.cache_salt:
            return
        if bypasses(request):
            self.state, self.max_offload_tokens = type(self.state).BYPASS_LMCACHE, 0
        else:
            self.cache_salt = _salt(request)

    return init


def bypasses(request: Any) -> bool:
    """Whether nothing of a request may be looked up or stored.

    The token ids of prompt embeddings are placeholders: all prompts of one length would be one. An adapter that can't
    be told from others would be all of them.
    """
    if _has_embeddings(request):
        return True
    return request.lora_request is not None and adapter_identity(request.lora_request) is None


def _has_embeddings(request: Any) -> bool:
    """Prompt embeddings, alone or as parts of a chat message beside images and the like.

    vLLM holds those parts as media. LMCache would know them by 31 bits for each token, which few tokens make too few.
    """
    if request.prompt_embeds is not None:
        return True
    return any(feature.modality == "prompt_embeds" for feature in request.mm_features or ())


def _salt(request: Any) -> str:
    adapter = None if request.lora_request is None else adapter_identity(request.lora_request)
    return salt_for(request.cache_salt or "", adapter)


def on_new_request(seam: Seam) -> Callable[..., None]:
    """Eager prefetch must not look up what bypasses the cache either."""
    original = seam.original

    @wraps(original)
    def arrived(self: Any, request: Any) -> None:
        seam.count()
        if not (self._eager_prefetch and bypasses(request)):
            original(self, request)

    return arrived


def register_kv_caches(seam: Seam) -> Callable[..., Any]:
    """Every store of a worker takes its bytes from the tensors that are registered here."""
    original = seam.original

    @wraps(original)
    def register(self: Any, kv_caches: dict[str, Any]) -> Any:
        seam.count()
        _check(carried(getattr(self, "_kv_cache_config", None)), kv_caches)
        _check_layout(self._vllm_config)
        return original(self, kv_caches)

    return register


def register_in_process(seam: Seam) -> Callable[..., Any]:
    """The same on the in-process path."""
    original = seam.original

    @wraps(original)
    def register(self: Any, kv_caches: dict[str, Any]) -> Any:
        seam.count()
        _check(published(), kv_caches)
        return original(self, kv_caches)

    return register


def _check(profile: KVCacheProfile | None, kv_caches: Mapping[str, Any]) -> None:
    """Refuse tensors that are not what the profile says."""
    if profile is None:
        process.refuse(missing("the registration of the KV caches"))
        return
    try:
        check_tensors(profile, kv_caches)
    except MismatchError as error:
        process.refuse(ProfileError(error.found, error.wanted, "Nothing of it may enter the cache: report it, please."))


def _check_layout(vllm_config: Any) -> None:
    """Where vLLM does not say how blocks lie in memory, LMCache goes on and guesses it from the tensors' shapes."""
    from lmcache.integration.vllm.utils import vllm_layout_hints

    if "kv_layout" not in vllm_layout_hints(vllm_config):
        process.refuse(
            ProfileError(
                "no KV cache layout that LMCache could ask vLLM for",
                "the engine's resolved layout",
                "Install a pair of releases that the README's table names.",
            )
        )


def token_database(seam: Seam) -> Callable[..., None]:
    """The in-process path makes all its keys from this object's copy of the metadata."""
    original = seam.original

    @wraps(original)
    def init(self: Any, config: Any = None, metadata: Any = None) -> None:
        seam.count()
        original(self, config, metadata)
        profile = published()
        if profile is not None and metadata is not None:
            self.metadata = dataclasses.replace(metadata, model_name=key_name(metadata.model_name, profile.fingerprint))

    return init


def get_num_new_matched_tokens(seam: Seam) -> Callable[..., Any]:
    """In-process: adapter and salt become a tag, before the first look-up reads the request's settings."""
    original = seam.original

    @wraps(original)
    def matched(self: Any, request: Any, num_computed_tokens: int) -> Any:
        seam.count()
        if _bypasses_in_process(request):
            return 0
        _tag(request)
        return original(self, request, num_computed_tokens)

    return matched


def _bypasses_in_process(request: Any) -> bool:
    """Requests without sampling parameters (pooling) have no place for a tag."""
    return request.sampling_params is None or bypasses(request)


def _tag(request: Any) -> None:
    extra = request.sampling_params.extra_args or {}
    theirs = extra.get("kv_transfer_params")
    given = dict(theirs) if isinstance(theirs, Mapping) else {}
    salt = _salt(request)
    if salt or any(str(name).startswith("lmcache.tag.") for name in given):
        request.sampling_params.extra_args = {**extra, "kv_transfer_params": tagged(given, salt)}


def new_in_process_request(seam: Seam) -> Callable[..., Any]:
    """In-process: what bypasses the cache is not stored, and a prompt of embeddings alone has token ids to count."""
    original = seam.original

    @wraps(original)
    def track(lmcache_config: Any, new_request: Any, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        if new_request.prompt_token_ids is None:
            new_request = dataclasses.replace(new_request, prompt_token_ids=[0] * new_request.prompt_len)
        tracker = original(lmcache_config, new_request, *args, **kwargs)
        tracker.skip_save = tracker.skip_save or _bypasses_in_process(new_request)
        return tracker

    return track
