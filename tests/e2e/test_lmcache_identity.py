"""Engines of different KV formats on one LMCache server: each answers from its own bytes, or computes."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.format_engines import FORMATS, HITS, Build, Engine, engine, same
from support.servers import LMCacheServer, lmcache_server


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    with lmcache_server(tmp_path_factory.mktemp("lmcache") / "lmcache.log") as server:
        yield server


def embeddings(value: float) -> str:
    """A prompt of 391 equal embeddings, as the API takes it."""
    import torch

    file = io.BytesIO()
    torch.save(torch.full((391, 128), value, dtype=torch.bfloat16), file)
    return base64.b64encode(file.getvalue()).decode()


def test_an_engine_does_not_answer_from_another_formats_bytes(build: Build, cache: LMCacheServer) -> None:
    """The corruption: stock reports 384 hits here and answers from e5m2 bytes read as e4m3."""
    with engine(build, cache, *FORMATS["fp8_e5m2"]) as writer:
        _, hits = writer.ask()
        assert hits == 0
        assert writer.ask()[1] == HITS
        theirs = writer.fingerprint()
    with engine(build, cache, *FORMATS["fp8_e4m3"], "--enable-prompt-embeds") as reader:
        assert reader.fingerprint() != theirs
        answer, hits = reader.ask()
        print(f"e4m3 after e5m2: {hits} hits, {answer[:3]}")
        assert hits == 0
        assert same(answer, reader.cold("reader"))
        again, hits = reader.ask()
        assert (hits, same(again, answer)) == (HITS, True)
        client_can_not_reach_another_namespace(reader, theirs)
        prompts_of_embeddings_bypass_the_cache(reader)


def client_can_not_reach_another_namespace(reader: Engine, fingerprint: str) -> None:
    forged = {"lmcache.tag.kvfp": fingerprint, "lmcache.tag.splint": fingerprint, "lmcache.model_name": fingerprint}
    answer, hits = reader.ask(kv_transfer_params=forged)
    assert (hits, same(answer, reader.cold("forged"))) == (HITS, True)
    assert reader.ask(cache_salt=fingerprint)[1] == 0


def prompts_of_embeddings_bypass_the_cache(reader: Engine) -> None:
    """Two prompts of equal length have the same placeholder token ids."""
    answers = []
    for value in (0.01, -0.02, 0.01):
        answer, hits = reader.ask(prompt=None, prompt_embeds=embeddings(value))
        assert hits == 0
        answers.append(answer)
    assert same(answers[0], answers[2])
    assert not same(answers[0], answers[1])


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_writer_and_every_reader_on_one_server_across_restarts(build: Build, tmp_path: Path) -> None:
    """Writers in turn see what the ones before them stored; then each comes back and sees what all have stored."""
    answers: dict[str, list[float]] = {}
    with lmcache_server(tmp_path / "lmcache.log") as cache:
        for name, flags in FORMATS.items():
            with engine(build, cache, *flags) as writer:
                answers[name], hits = writer.ask()
                print(f"{name} after {[*answers][:-1]}: {hits} hits")
                assert hits == 0
                assert same(answers[name], writer.cold(name))
        for name, flags in FORMATS.items():
            with engine(build, cache, *flags) as reader:
                answer, hits = reader.ask()
                print(f"{name} after a restart: {hits} hits, {answer[:3]}")
                assert (hits, same(answer, answers[name])) == (HITS, True)
                assert same(answer, reader.cold(f"{name} again"))


@pytest.mark.full
def test_engines_of_both_transfer_modes_work_side_by_side_and_share_nothing(build: Build, tmp_path: Path) -> None:
    """Their objects have other shapes under one name in stock's keys: the second one was refused until a restart."""
    with (
        lmcache_server(tmp_path / "lmcache.log") as cache,
        engine(build, cache, mode="engine_driven") as one,
        engine(build, cache, mode="lmcache_driven") as other,
    ):
        answer, hits = one.ask()
        assert (hits, one.ask()[1]) == (0, HITS)
        theirs, hits = other.ask()
        print(f"the server copies, after the worker has: {hits} hits, {theirs[:3]}")
        assert (hits, same(theirs, other.cold("other"))) == (0, True)
        for engine_, cold in ((other, theirs), (one, answer)):
            again, hits = engine_.ask()
            assert (hits, same(again, cold)) == (HITS, True)


def dense_model(model: str, folder: Path) -> str:
    """The tiny model without experts: vLLM's LoRA of expert layers needs a GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    sizes = json.loads(Path(model, "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept = {name: sizes[name] for name in (*names, "num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **kept), dtype=torch.bfloat16)
    made.save_pretrained(folder)
    return str(folder)


def adapter(folder: Path, seed: int) -> str:
    """A LoRA adapter of random weights for the queries and outputs of the tiny model's two layers."""
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": (128, 256), "o_proj": (256, 128)}
    tensors = {}
    for name, (wide, out) in sizes.items():
        for layer in range(2):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, wide, generator=source).to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, 8, generator=source).to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": [*sizes], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.full
def test_adapters_and_the_bare_model_answer_from_their_own_bytes(build: Build, model: str, tmp_path: Path) -> None:
    dense = dense_model(model, tmp_path / "dense")
    modules = [f"{name}={adapter(tmp_path / name, seed)}" for seed, name in enumerate(("one", "two"))]
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules)
    with lmcache_server(tmp_path / "lmcache.log") as cache, engine(build, cache, *flags, model_path=dense) as server:
        cold = {}
        for name in ("tiny", "one", "two"):
            cold[name], hits = server.ask(model=name)
            assert hits == 0, name
        assert len({tuple(answer) for answer in cold.values()}) == 3
        for name, answer in cold.items():
            again, hits = server.ask(model=name)
            assert (hits, same(again, answer)) == (HITS, True), name


@pytest.mark.full
def test_without_the_patch_the_fault_is_there(build: Build, tmp_path: Path) -> None:
    """What this patch holds: it may go when this test fails."""
    with lmcache_server(tmp_path / "lmcache.log") as cache:
        with engine(build, cache, *FORMATS["fp8_e5m2"], patches="-lmcache_identity") as writer:
            writer.ask()
            assert writer.ask()[1] == HITS
        with engine(build, cache, *FORMATS["fp8_e4m3"], patches="-lmcache_identity") as reader:
            answer, hits = reader.ask()
            cold = reader.cold("reader")
            print(f"without the patch: {hits} hits, {answer[:3]}, cold {cold[:3]}")
            assert (hits, same(answer, cold)) == (HITS, False)
