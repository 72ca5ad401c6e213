"""The command ``splint plan``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from entrypoint.planning.plan import Plan

__all__ = ["plan"]


def plan(  # noqa: PLR0913, PLR0917 - one parameter a flag
    model: Annotated[str, typer.Argument(help="The model's folder: only its config.json is read.")],
    device_memory: Annotated[str, typer.Option(help="Of one device, as nvidia-smi shows it: 143771MiB, 80GiB.")],
    tp: Annotated[int, typer.Option("--tensor-parallel-size", "--tp", min=1)] = 1,
    pp: Annotated[int, typer.Option("--pipeline-parallel-size", "--pp", min=1)] = 1,
    dp: Annotated[int, typer.Option("--data-parallel-size", "--dp", min=1)] = 1,
    expert_parallel: Annotated[bool, typer.Option("--enable-expert-parallel", "--ep")] = False,
    dtype: str = "auto",
    quantization: Annotated[str | None, typer.Option(help="The checkpoint's own; another is refused.")] = None,
    kv_cache_dtype: str = "auto",
    gpu_memory_utilization: float | None = None,
    max_model_len: int | None = None,
    block_size: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    kv_cache_memory_bytes: str | None = None,
    num_gpu_blocks_override: int | None = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager")] = False,
    weights_memory: Annotated[str | None, typer.Option(help="Measured: weights of one device.")] = None,
    activation_memory: Annotated[str | None, typer.Option(help="Measured: peak of the profile run.")] = None,
    graph_memory: Annotated[str | None, typer.Option(help="Measured: CUDA graphs.")] = None,
    other_memory: Annotated[str | None, typer.Option(help="Measured: context, communication.")] = None,
    without_vllm: Annotated[bool, typer.Option("--without-vllm", help="The pure model alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan memory, KV blocks and concurrency of a deployment, before there is a device."""
    from entrypoint.planning.deployment import Deployment
    from entrypoint.planning.plan import make

    wanted = Deployment(
        tp=tp, pp=pp, dp=dp, expert_parallel=expert_parallel, dtype=dtype, kv_dtype=kv_cache_dtype,
        utilisation=gpu_memory_utilization, max_model_len=max_model_len, block_size=block_size,
        blocks_override=num_gpu_blocks_override, batched_tokens=max_num_batched_tokens, sequences=max_num_seqs,
        eager=enforce_eager, device_memory=_size("--device-memory", device_memory),
        kv_memory=_measured("kv_memory", kv_cache_memory_bytes), weights=_measured("weights", weights_memory),
        activation=_measured("activation", activation_memory), graphs=_measured("graphs", graph_memory),
        other=_measured("other", other_memory),
    )  # fmt: skip
    _show(make(model, wanted, quantization, with_vllm=not without_vllm), as_json=as_json)


def _size(what: str, text: str) -> int:
    from entrypoint.planning import sizes

    return sizes.parse(text, what)


def _measured(what: str, text: str | None) -> int | None:
    return None if text is None else _size(what, text)


def _show(made: Plan, *, as_json: bool) -> None:
    from entrypoint.planning import render

    if as_json:
        print(json.dumps(render.as_json(made), indent=2))
        return
    from rich.console import Console

    Console(soft_wrap=False, highlight=False).print(render.render(made))
