"""The tiny models in Transformers and float32: an engine-free reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.expert_parallel_probe import Prompt, Scores

__all__ = ["reference_scores"]


def reference_scores(model: Path, prompts: Sequence[Prompt], *, exchanged: bool = False) -> list[Scores]:
    """Log-probabilities of the given tokens; with ``exchanged`` the halves of every layer's experts trade places."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        if exchanged:
            _exchange_halves(loaded)
        return [Scores(_log_probabilities(loaded, prompt), (), ()) for prompt in prompts]


def _exchange_halves(model: Any) -> None:
    weights = [weight for name, weight in model.named_parameters() if ".experts." in name]
    if not weights:
        raise LookupError("the model has no expert weights")
    for weight in weights:
        weight.copy_(weight.roll(weight.shape[0] // 2, 0))


def _log_probabilities(model: Any, prompt: Prompt) -> tuple[float, ...]:
    tokens = torch.tensor([prompt])
    scores = model(tokens).logits[0, :-1].log_softmax(-1)
    return tuple(scores.gather(1, tokens[0, 1:, None]).flatten().tolist())
