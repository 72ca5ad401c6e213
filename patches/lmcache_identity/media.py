"""What an engine makes of images, audio and video before the model sees them.

vLLM names each of them by its content and by what the *request* says of its processing. Settings of the engine and
files of the model's processor are the same for all requests of one engine, so they are not in that name; but they
decide what a prompt's placeholders stand for, and engines with other ones must not share it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["processing_of"]

_SETTINGS = (
    "mm_processor_kwargs", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)  # fmt: skip
"""Fields of vLLM's ``MultiModalConfig``; the others leave a medium's embedding as it is, or are in its name."""

_FILES = "*processor_config.json"
"""Of a processor: for images, audio and video together, and one for each. A commit of the weights covers them, too."""


def processing_of(model: Any) -> dict[str, Any] | None:
    """How media become embeddings, as configuration values, or None for a model that takes text alone.

    Args:
        model: vLLM's ``ModelConfig``.
    """
    media = getattr(model, "multimodal_config", None)
    if media is None:
        return None
    settings = {name: getattr(media, name, None) for name in _SETTINGS}
    files = {file.name: file.read_text("utf-8", "replace") for file in sorted(Path(model.model).glob(_FILES))}
    return {**settings, "files": files}
