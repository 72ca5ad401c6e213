"""Makes a tiny random mixture-of-experts model with tokenizer and chat template; nothing is downloaded.

``python -m entrypoint.local.model [ARCHITECTURE] [--folder FOLDER]`` prints the model's path. It takes seconds the
first time and is there from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["ARCHITECTURES", "VOCABULARY", "cache_folder", "make_tiny_model"]

SEED = 0
VOCABULARY = 512
"""Tokens, every one of which the tokenizer can decode."""

END = "<|end|>"
SPECIAL_TOKENS = (END, "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"

# Any text does; it must hold enough different pairs of letters to fill the vocabulary.
TEXT = """
A splint keeps a broken bone still until the body has mended it, and then it comes off. It is no cure and claims to be
none. Whoever fits one looks first, sets the limb, binds it firmly and checks that blood still reaches the fingers
before the patient may walk away. Engines that answer questions for many people at once keep what they have already
worked out in pages of memory, share those pages between neighbours, and write them somewhere slower when the fast
room is full. Quick brown foxes jump over lazy dogs; wizards vex the judge; sixty zippers were quickly picked from the
woven jute bag. Numbers such as 0, 1, 23, 456 and 7890 appear beside words, and punctuation follows: commas, colons,
question marks? Yes! Experts are chosen by a router, two for every token, and their opinions are weighed and summed.
When one worker is slow the others wait, unless somebody thought of that beforehand. Nothing is served until it has
been proven.
"""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_COMMON,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "mixtral": {**_COMMON, "intermediate_size": 64, "num_local_experts": 8, "sliding_window": None},
}
"""Model type in Transformers' naming, and its configuration: about 1 M parameters, 8 experts, 2 of them a token."""


def make_tiny_model(architecture: str = "qwen3_moe", folder: Path | None = None) -> Path:
    """Make the model unless it is there, and return its path.

    Args:
        architecture: A key of :data:`ARCHITECTURES`.
        folder: Where models are kept; :func:`cache_folder` by default.

    Raises:
        KeyError: an unknown architecture.
        OSError: the folder can't be written.
    """
    path = (folder or cache_folder()) / f"tiny-{architecture}-{_recipe(architecture)}"
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        _make(architecture, path)
    return path


def cache_folder() -> Path:
    """The user's cache folder for models, else one in the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(base, "vllm-splint", "models")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir(), f"vllm-splint-{os.getuid()}", "models")
    return folder


def _recipe(architecture: str) -> str:
    """A short digest of everything that the model is made from; a changed recipe is another model."""
    parts = [SEED, SPECIAL_TOKENS, CHAT_TEMPLATE, TEXT, ARCHITECTURES[architecture]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def _make(architecture: str, path: Path) -> None:
    """Write the model beside ``path`` and move it there whole, so that an interruption leaves no half of one."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        _write_tokenizer(unfinished)
        _write_weights(architecture, unfinished)
        _let_all_read(unfinished)
        _publish(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _let_all_read(folder: Path) -> None:
    """Undo the owner-only modes of ``mkdtemp`` and safetensors: a server may run as any user."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def _publish(unfinished: Path, path: Path) -> None:
    try:
        unfinished.rename(path)
    except OSError:
        if not path.is_dir():  # else another process made the same model meanwhile
            raise


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _write_weights(architecture: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main() -> None:
    """Make a model and print its path."""
    parser = argparse.ArgumentParser(prog="python -m entrypoint.local.model", description=__doc__)
    parser.add_argument("architecture", nargs="?", default="qwen3_moe", choices=sorted(ARCHITECTURES))
    parser.add_argument("--folder", type=Path, help="where models are kept")
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.architecture, arguments.folder))


if __name__ == "__main__":
    main()
