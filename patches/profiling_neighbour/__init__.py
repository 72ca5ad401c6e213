"""A neighbour that frees memory while a worker profiles no longer ends the worker, nor swells its KV cache unseen."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

PATCH = Patch(
    id="profiling_neighbour",
    purpose="Sizes the KV cache from the process's own memory where a neighbour freed some during profiling.",
    fault=(
        "What a worker takes is measured as the drop of free memory on its device. A neighbour that frees memory "
        "meanwhile makes the drop too small, so the KV cache takes more than its share; where free memory has grown, "
        "an AssertionError ends the server instead. ROCm has had a fallback since 0.29, CUDA has none."
    ),
    library="vllm",
    releases=">=0.19",
    targets=(
        Target("vllm.utils.mem_utils", "memory_profiling", "patches.profiling_neighbour.wrappers:memory_profiling"),
    ),
    roles=frozenset({Role.WORKER}),
    retires="vLLM measures the memory of its own process, or falls back to it on every platform.",
    exercised_by="the memory profiling of each worker on a GPU; a neighbour that frees memory meanwhile",
    exercises=(Exercise(Role.WORKER, ("memory_profiling",), frozenset({Feature.MEASURED})),),
    upstream=("vllm#56830", "vllm#53591"),
)
