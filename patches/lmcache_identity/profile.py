"""What an engine's KV cache is, as data, and the fingerprint that stands for it in every cache key.

Nothing in here imports vLLM, LMCache or torch: dtypes are torch's names without ``torch.``, such as ``uint8``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from patches.framework.errors import MismatchError, ProfileError
from patches.lmcache_identity.layouts import ITEM_BYTES, Layout

__all__ = ["OPAQUE", "RUN_TIME_SCALES", "VERSION", "KVCacheProfile", "KVGroup", "check_block", "key_name"]

VERSION = 1
"""Changes whenever the same engine would get another fingerprint: what older releases stored is then not found."""

DIGITS = 12
RUN_TIME_SCALES = "run-time"
OPAQUE = "opaque"
"""The dtype of groups that are no attention: their tensors have shapes of their own."""

_QUANTISED_AUTO = "FP8_PER_TENSOR"


@dataclass(frozen=True)
class KVGroup:
    """Layers of one pipeline stage that share a block table and a format.

    Attributes:
        stage: Pipeline stage, from 0.
        index: Number of the group in vLLM's own list.
        layers: Names of the layers, in vLLM's order.
        kind: What one block holds: ``full_attention``, ``mla_attention``, ``mamba`` and so on.
        heads: KV heads (head slots of a page) on one rank.
        head_dim: Elements of one key; 0 where a block holds no heads.
        row_bytes: Bytes of one stored state in one layer on one rank. A state is a token, save where
            :attr:`tokens_per_state` says otherwise; a Mamba state is that of the whole sequence.
        dtype: Torch's name of the stored elements, or :data:`OPAQUE`.
        quantisation: vLLM's ``KVQuantMode`` by name; e4m3 and e5m2 share one.
        tokens_per_state: Tokens that one state covers, a whole number or a fraction.
        extra: Further fields that give bytes another meaning, sorted by name.
    """

    stage: int
    index: int
    layers: tuple[str, ...]
    kind: str
    heads: int
    head_dim: int
    row_bytes: int
    dtype: str
    quantisation: str = "NONE"
    tokens_per_state: str = "1"
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def is_latent(self) -> bool:
        """Whether a token is one vector that all ranks of a tensor-parallel group hold alike (MLA)."""
        return "mla" in self.kind

    @property
    def token_bytes(self) -> Fraction:
        """Bytes of one token over the group's layers, on one rank; 0 where states do not grow with tokens."""
        per_state = Fraction(self.tokens_per_state)
        return self.row_bytes * len(self.layers) / per_state if per_state > 0 else Fraction(0)

    def block_shape(self, tokens: int, layout: Layout) -> tuple[int, ...]:
        """Shape of one block of ``tokens`` tokens in one layer on one rank, in elements of :attr:`dtype`."""
        row = self.row_bytes // ITEM_BYTES[self.dtype]
        return layout.block_shape(tokens, self.heads, row, latent=self.is_latent)


@dataclass(frozen=True)
class KVCacheProfile:
    """One engine's KV cache: everything that gives its bytes their meaning.

    Block size, page bytes and the order of heads and tokens in a page (NHD, HND) are not in it: LMCache's objects are
    the same for all of them, save for groups whose blocks are no rows of one token each, which say so in
    :attr:`KVGroup.extra`.

    Attributes:
        cache_dtype: The operator's ``--kv-cache-dtype``, resolved: ``bfloat16`` for ``auto``, ``fp8_e4m3`` for ``fp8``.
        dtype: Torch's name of the dtype that the model computes in.
        layout: How a block holds keys and values.
        tensor_parallel: Ranks that share the KV heads.
        pipeline_parallel: Pipeline stages.
        decode_context_parallel: Ranks that share the tokens of a sequence.
        prefill_context_parallel: Ranks that share the tokens of a prompt.
        interleave: Tokens in a row on one rank under context parallelism.
        weights: ``commit:<revision>`` or ``index:<digest>`` of the weight files.
        configuration: Digest of the resolved HF configuration, overrides included.
        weight_quantisation: vLLM's name of the weights' quantisation, with a digest of its settings; empty for none.
        scales: Where KV scales come from: ``checkpoint``, or :data:`RUN_TIME_SCALES`.
        draft: Identity of the speculative model, whose layers are cached too; empty where there is none.
        transfer: Who copies between worker and LMCache server, where the operator asked for another mode than the
            device's own: the objects of both have other shapes. Empty for the device's own.
        adapters: Digest of settings by which the engine uses LoRA adapters otherwise than whole and in the model's
            dtype; empty where there are none.
        groups: Every layer group of every stage; empty until the workers have said what their layers need.
    """

    cache_dtype: str
    dtype: str
    layout: Layout
    weights: str
    configuration: str
    weight_quantisation: str = ""
    scales: str = "checkpoint"
    draft: str = ""
    transfer: str = ""
    adapters: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    interleave: int = 1
    groups: tuple[KVGroup, ...] = ()

    def with_groups(self, groups: Iterable[KVGroup], fp8: str = "fp8_e4m3") -> KVCacheProfile:
        """The whole model's profile, once the workers have said what their layers need.

        Args:
            groups: Every layer group of every stage.
            fp8: What ``fp8`` means on this platform. A checkpoint with a KV scheme of its own turns ``auto`` into
                that while a worker loads it.
        """
        found = tuple(groups)
        quantised = any(group.quantisation == _QUANTISED_AUTO for group in found)
        return replace(self, groups=found, cache_dtype=fp8 if quantised and self._is_auto else self.cache_dtype)

    @property
    def _is_auto(self) -> bool:
        return self.cache_dtype == self.dtype

    @property
    def digest(self) -> str:
        """SHA-256 of the profile in canonical form, in hex; the same in every process and on every host.

        Raises:
            ProfileError: the KV scales are computed at run time, so that equal bytes mean something else in each run.
        """
        if self.scales == RUN_TIME_SCALES:
            raise ProfileError(
                "calculate_kv_scales makes the KV scales at run time",
                "scales from the checkpoint, which are the same in every run",
                "Remove --calculate-kv-scales, or run without an external KV cache.",
            )
        content = asdict(self) | {"version": VERSION}
        if self.groups and all(group.is_latent for group in self.groups):
            content["tensor_parallel"] = 1
        for name in ("transfer", "adapters"):
            if not content[name]:
                del content[name]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """What stands in cache keys: ``kv<version>-<12 hex digits>``. Raises like :attr:`digest`."""
        return f"kv{VERSION}-{self.digest[:DIGITS]}"

    def block_shape(self, tokens: int, layer: str | None = None) -> tuple[int, ...]:
        """Shape of one block on one rank, in elements of its group's dtype.

        Args:
            tokens: Tokens of the block.
            layer: A layer's name; the first layer by default.

        Raises:
            ProfileError: the profile has no groups, or no such layer.
        """
        return self.group_of(layer).block_shape(tokens, self.layout)

    def group_of(self, layer: str | None = None) -> KVGroup:
        """The group of ``layer``, by default the first. Raises ProfileError: there is none."""
        for group in self.groups:
            if layer is None or layer in group.layers:
                return group
        raise ProfileError(
            f"the profile has no layer {layer!r}" if self.groups else "the profile has no layers",
            "a profile of the whole model",
            _REMEDY,
        )

    @property
    def token_bytes(self) -> float:
        """Bytes of one token over all layers that grow with tokens, on one rank of each stage."""
        return float(sum(group.token_bytes for group in self.groups))

    def summary(self) -> str:
        """One line for people."""
        formats = {(group.kind, group.heads, group.head_dim): 0 for group in self.groups}
        for group in self.groups:
            formats[group.kind, group.heads, group.head_dim] += len(group.layers)
        layers = ", ".join(f"{count} x {kind} {heads} x {dim}" for (kind, heads, dim), count in formats.items())
        parallel = f"TP{self.tensor_parallel} PP{self.pipeline_parallel} DCP{self.decode_context_parallel}"
        return f"{self.cache_dtype} · {layers} · {self.token_bytes:g} B a token · {self.layout.value} · {parallel}"

    def content(self) -> dict[str, Any]:
        """The fields without the groups, as JSON values."""
        content = asdict(self) | {"layout": self.layout.value}
        del content["groups"]
        return content

    def describe(self) -> dict[str, Any]:
        """The profile as JSON values, for the report."""
        return {
            **self.content(),
            "fingerprint": self.fingerprint,
            "digest": self.digest,
            "token_bytes": self.token_bytes,
            "layers": sum(len(group.layers) for group in self.groups),
            "summary": self.summary(),
        }


_REMEDY = "Report it with the engine's arguments, or leave out kv_profile and lmcache_identity with SPLINT_PATCHES."


def check_block(profile: KVCacheProfile, dtype: str, shape: tuple[int, ...], layer: str | None = None) -> None:
    """Hold one block against its profile. Every path into a cache and out of one asks this.

    Args:
        profile: The whole model's profile.
        dtype: Torch's name of the block's dtype.
        shape: The block's shape; how many tokens it holds is taken from it.
        layer: The layer it belongs to; the first layer by default.

    Raises:
        MismatchError: dtype or shape differ.
        ProfileError: the profile has no such layer.
    """
    group = profile.group_of(layer)
    axis = profile.layout.token_axis(latent=group.is_latent)
    tokens = shape[axis] if axis < len(shape) else 0
    wanted = group.block_shape(tokens, profile.layout)
    if dtype != group.dtype or shape != wanted or not tokens:
        raise MismatchError(
            f"a KV block of {dtype} {list(shape)}",
            f"{group.dtype} {_shown(group.block_shape(1, profile.layout), axis)}, as {profile.fingerprint} has it",
            "It was made by another engine configuration, or is damaged; it is not used.",
        )


def _shown(shape: tuple[int, ...], token_axis: int) -> str:
    return "[" + ", ".join("tokens" if axis == token_axis else str(size) for axis, size in enumerate(shape)) + "]"


LONGEST_MODEL = 48
_SEPARATORS = frozenset("@%\\")


def key_name(model: str, fingerprint: str, longest: int = LONGEST_MODEL) -> str:
    """The model's name as it stands in cache keys: the operator's, as far as keys can hold it, and the fingerprint.

    Stock puts the whole path into every key; file names of more than 255 bytes and ``lm://`` keys of more than 150
    then fail. A name that is too long, or has one of the keys' own separators in it, becomes a digest and its last
    part.
    """
    if len(model) > longest or _SEPARATORS & set(model):
        end = "".join(sign for sign in model.rpartition("/")[2] if sign not in _SEPARATORS)
        digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
        model = f"{digest}-{end[DIGITS + 1 - longest :]}"
    return f"{model}-{fingerprint}"
