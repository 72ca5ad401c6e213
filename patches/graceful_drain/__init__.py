"""SIGTERM lets requests in flight end whole, unless the operator gave ``--shutdown-timeout``."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_WRAPPERS = "patches.graceful_drain.wrappers"
_PARSER = f"{_WRAPPERS}:make_arg_parser"

PATCH = Patch(
    id="graceful_drain",
    purpose="SIGTERM lets requests in flight end, 20 s at most (--shutdown-timeout wins), and refuses new ones.",
    fault="By default SIGTERM aborts every request in flight; under several API servers also where a time to drain is"
    " set, because each of them closes its connections to the engines at once. A new request gets an empty answer.",
    library="vllm",
    releases=">=0.32",
    targets=(
        Target("vllm.entrypoints.launchers.cli_args", "make_arg_parser", _PARSER, releases="<0.33"),
        Target("vllm.entrypoints.common.cli_args", "make_arg_parser", _PARSER, releases=">=0.33"),
        Target("vllm.v1.engine.async_llm", "AsyncLLM.shutdown", f"{_WRAPPERS}:shutdown"),
    ),
    roles=frozenset({Role.API_SERVER, Role.LAUNCHER}),
    retires="vLLM drains by default, under several API servers too, and answers new requests with 503 meanwhile.",
    exercised_by="the start of each server by a command of vLLM's; its end",
    exercises=(
        Exercise(Role.LAUNCHER, ("make_arg_parser",), frozenset({Feature.COMMAND})),
        Exercise(Role.API_SERVER, ("make_arg_parser",), frozenset({Feature.COMMAND, Feature.ONE_API_SERVER})),
    ),
)
