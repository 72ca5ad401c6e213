# Two images: `gpu` (the last stage, so the default) on the stock vLLM image, `cpu` from a plain Python image.
#   docker build -t vllm-splint .
#   docker build -t vllm-splint:cpu --target cpu .
# A folder with wheels that the package index lacks can be given as --build-context wheels=FOLDER.
ARG BASE_IMAGE=vllm/vllm-openai:v0.32.0
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM scratch AS wheels

# Build tools from the locks, and what the other stages install. Of the tool stages only the project's wheel goes into
# an image.
FROM ${PYTHON_IMAGE} AS tools
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
ENV PYTHONPATH=/src/tools PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1
COPY requirements requirements
COPY tools/envsetup/__init__.py tools/envsetup/lockfile.py tools/envsetup/venv.py tools/envsetup/
COPY tools/containers/*.py tools/containers/
RUN mkdir /pins \
 && python3 -m containers.pins cpu dev --only uv hatchling packaging pathspec pluggy trove-classifiers >/pins/tools.txt \
 && python3 -m containers.pins cpu --except lmcache >/pins/stock.txt \
 && python3 -m containers.pins cpu --only lmcache >/pins/lmcache.txt \
 && python3 -m pip install --no-deps --require-hashes -r /pins/tools.txt \
 && mkdir /uv && cp "$(command -v uv)" /uv/

# Makes the bills of materials; its own Python, so that it does not matter which one an image has. They mount copied
# metadata, not the image: the builder takes the digest of every file that it mounts.
FROM tools AS bom
RUN /uv/uv pip install --system --break-system-packages --no-deps --require-hashes --no-cache -r requirements/sbom.lock

FROM tools AS wheel
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY patches patches
COPY entrypoint entrypoint
RUN python3 -m pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

# What the stock image is for the GPU: vLLM in the system's Python, /vllm-workspace, nothing of this project.
FROM ${PYTHON_IMAGE} AS cpu-base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The distribution's current security updates are wanted, so no version is named.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=tools,source=/uv,target=/uv --mount=type=bind,from=tools,source=/pins,target=/pins \
    --mount=type=bind,from=wheels,target=/wheels \
    if compgen -G '/wheels/torch-*' >/dev/null; then backend=(); else backend=(--torch-backend=cpu); fi \
 && /uv/uv pip install --system --break-system-packages --no-deps --require-hashes --no-cache --compile-bytecode \
      --find-links /wheels "${backend[@]}" -r /pins/stock.txt
RUN --mount=type=bind,from=tools,source=/src/tools,target=/tools PYTHONPATH=/tools python3 -m containers.alias
# There is no C++ compiler in it, which torch needs on a CPU for functions that vLLM compiles even with --enforce-eager.
ENV TORCH_COMPILE_DISABLE=1
WORKDIR /vllm-workspace
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]

FROM cpu-base AS cpu-installed
RUN --mount=type=bind,from=tools,source=/uv,target=/uv --mount=type=bind,from=tools,source=/pins,target=/pins \
    /uv/uv pip install --system --break-system-packages --no-deps --require-hashes --no-cache --compile-bytecode -r /pins/lmcache.txt
RUN --mount=type=bind,from=tools,source=/uv,target=/uv --mount=type=bind,from=wheel,source=/dist,target=/dist \
    python3 -m pip list --format=freeze >/tmp/before.txt \
 && /uv/uv pip install --system --break-system-packages --no-deps --no-cache --compile-bytecode /dist/*.whl \
 && splint image verify --before /tmp/before.txt \
 && rm /tmp/before.txt

FROM ${BASE_IMAGE} AS gpu-installed
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The release that is tested; what else it needs and the base lacks is resolved around what the base has.
ARG LMCACHE=0.5.6
# LMCache caps these below what a base may hold. Nothing else of the base may move, torch and vLLM least of all.
ARG MAY_MOVE="numpy opentelemetry-* prometheus-client protobuf googleapis-common-protos grpcio* setuptools"
# No cache is kept (PIP_NO_CACHE_DIR); the shell is bash.
# hadolint ignore=DL3042,SC3054
RUN --mount=type=bind,from=tools,source=/src/tools,target=/tools \
    export PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1 \
 && set -f && PYTHONPATH=/tools python3 -m containers.held ${MAY_MOVE} >/tmp/held.txt && set +f \
 && mapfile -t stock < <(grep -E '^(torch|vllm)==' /tmp/held.txt) \
 && python3 -m pip install --constraint /tmp/held.txt "${stock[@]}" "lmcache==${LMCACHE}"
# hadolint ignore=DL3042
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    export PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1 \
 && python3 -m pip install --constraint /tmp/held.txt /dist/*.whl \
 && splint image verify --before /tmp/held.txt \
 && rm /tmp/held.txt

FROM cpu-installed AS cpu-metadata
RUN --mount=type=bind,from=tools,source=/src/tools,target=/tools python3 /tools/containers/metadata.py /metadata

FROM bom AS cpu-bom
RUN --mount=type=bind,from=cpu-metadata,source=/metadata,target=/metadata \
    cyclonedx-py environment --output-reproducible --of JSON -o /sbom.cdx.json /src/tools/containers/metadata.py

FROM cpu-installed AS cpu
COPY --from=cpu-bom /sbom.cdx.json /usr/share/vllm-splint/sbom.cdx.json
# As root these are what Docker sets anyway; any other user of group 0 finds its caches in the same place.
ENV HOME=/root LOGNAME=root
RUN mkdir -p /root/.cache/huggingface /root/.cache/vllm /root/.config/vllm /root/.triton \
 && find /root /vllm-workspace -xdev -type d -exec chmod g=u,o+rx {} + \
 && python3 -m entrypoint.local.model --folder /models && ln -s /models/tiny-qwen3_moe-* /models/tiny-moe
# labels: generated by make tables
LABEL org.opencontainers.image.title='vllm-splint' \
      org.opencontainers.image.description='vLLM and LMCache with their known faults held, proven before serving' \
      org.opencontainers.image.licenses='Apache-2.0' \
      org.opencontainers.image.version='0.1.0' \
      io.vllm-splint.patches='[{"id":"process_roster","library":"vllm","releases":">=0.19","upstream":[]},{"id":"lmcache_roster","library":"lmcache","releases":">=0.3","upstream":[]},{"id":"serving_gate","library":"vllm","releases":">=0.19","upstream":["vllm#24207","vllm#36960","vllm#50282"]},{"id":"graceful_drain","library":"vllm","releases":">=0.32","upstream":[]},{"id":"kv_probe","library":"vllm","releases":">=0.32","upstream":["vllm#24207"]},{"id":"patch_identity","library":"vllm","releases":">=0.32","upstream":[]},{"id":"kv_budget","library":"vllm","releases":">=0.32","upstream":["vllm#47722","vllm#46106","vllm#35478","vllm#54354"]},{"id":"cpu_amx_permission","library":"vllm","releases":">=0.32","upstream":[]},{"id":"cpu_expert_parallel","library":"vllm","releases":">=0.32","upstream":[]},{"id":"moriio_dp_rank","library":"vllm","releases":">=0.19,<0.27","upstream":["vllm#46106","vllm#46107","vllm#46116"]},{"id":"startup_plan_rank","library":"vllm","releases":">=0.26","upstream":["vllm#47388"]},{"id":"lmcache_availability","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"kv_load_recompute","library":"vllm","releases":">=0.32","upstream":[]},{"id":"lmcache_unfinished_store","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_failed_transfer","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_failed_load","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_client_params","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_in_process","library":"vllm","releases":">=0.32","upstream":["LMCache#4463","LMCache#4614","vllm#42911"]},{"id":"lmcache_whole","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"mla_kv_spec","library":"vllm","releases":">=0.25,<0.26","upstream":["vllm#47722","vllm#48378","vllm#48405","vllm#48896","vllm#48379"]},{"id":"turboquant_kv_spec","library":"vllm","releases":">=0.25,<0.27","upstream":["vllm#47604","vllm#47609"]},{"id":"profile_routing","library":"vllm","releases":">=0.25,<0.31","upstream":["vllm#57270"]},{"id":"dummy_token_routing","library":"vllm","releases":">=0.19","upstream":["vllm#57262"]},{"id":"kv_null_block","library":"vllm","releases":">=0.19,<0.29","upstream":["vllm#35541","vllm#41069","vllm#47272","vllm#48724"]},{"id":"kv_profile","library":"vllm","releases":">=0.32","upstream":[]},{"id":"lmcache_identity","library":"lmcache","releases":">=0.5.6","upstream":["LMCache#2961","vllm#44250"]},{"id":"lmcache_admission","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_admission_in_process","library":"lmcache","releases":">=0.5.6","upstream":["LMCache#2517"]},{"id":"lmcache_exact_transfer","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"profiling_neighbour","library":"vllm","releases":">=0.19","upstream":["vllm#56830","vllm#53591"]},{"id":"kv_override_check","library":"vllm","releases":">=0.19","upstream":["vllm#22234"]}]' \
      io.vllm-splint.reviewed='lmcache-0.5.6 vllm-0.19.0 vllm-0.19.1 vllm-0.20.0 vllm-0.20.1 vllm-0.20.2 vllm-0.21.0 vllm-0.22.0 vllm-0.22.1 vllm-0.23.0 vllm-0.24.0 vllm-0.25.0 vllm-0.25.1 vllm-0.26.0 vllm-0.27.0 vllm-0.27.1 vllm-0.28.0 vllm-0.29.0 vllm-0.30.0 vllm-0.31.0 vllm-0.32.0 vllm-0.33.0'
# end of labels
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 CMD ["splint", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["splint", "serve"]

FROM gpu-installed AS gpu-metadata
RUN --mount=type=bind,from=tools,source=/src/tools,target=/tools python3 /tools/containers/metadata.py /metadata

FROM bom AS gpu-bom
RUN --mount=type=bind,from=gpu-metadata,source=/metadata,target=/metadata \
    cyclonedx-py environment --output-reproducible --of JSON -o /sbom.cdx.json /src/tools/containers/metadata.py

FROM gpu-installed AS gpu
COPY --from=gpu-bom /sbom.cdx.json /usr/share/vllm-splint/sbom.cdx.json
ENV HOME=/root LOGNAME=root
RUN mkdir -p /root/.cache/huggingface /root/.cache/vllm /root/.config/vllm /root/.triton \
 && find /root /vllm-workspace -xdev -type d -exec chmod g=u,o+rx {} +
# labels: generated by make tables
LABEL org.opencontainers.image.title='vllm-splint' \
      org.opencontainers.image.description='vLLM and LMCache with their known faults held, proven before serving' \
      org.opencontainers.image.licenses='Apache-2.0' \
      org.opencontainers.image.version='0.1.0' \
      io.vllm-splint.patches='[{"id":"process_roster","library":"vllm","releases":">=0.19","upstream":[]},{"id":"lmcache_roster","library":"lmcache","releases":">=0.3","upstream":[]},{"id":"serving_gate","library":"vllm","releases":">=0.19","upstream":["vllm#24207","vllm#36960","vllm#50282"]},{"id":"graceful_drain","library":"vllm","releases":">=0.32","upstream":[]},{"id":"kv_probe","library":"vllm","releases":">=0.32","upstream":["vllm#24207"]},{"id":"patch_identity","library":"vllm","releases":">=0.32","upstream":[]},{"id":"kv_budget","library":"vllm","releases":">=0.32","upstream":["vllm#47722","vllm#46106","vllm#35478","vllm#54354"]},{"id":"cpu_amx_permission","library":"vllm","releases":">=0.32","upstream":[]},{"id":"cpu_expert_parallel","library":"vllm","releases":">=0.32","upstream":[]},{"id":"moriio_dp_rank","library":"vllm","releases":">=0.19,<0.27","upstream":["vllm#46106","vllm#46107","vllm#46116"]},{"id":"startup_plan_rank","library":"vllm","releases":">=0.26","upstream":["vllm#47388"]},{"id":"lmcache_availability","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"kv_load_recompute","library":"vllm","releases":">=0.32","upstream":[]},{"id":"lmcache_unfinished_store","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_failed_transfer","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_failed_load","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_client_params","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_in_process","library":"vllm","releases":">=0.32","upstream":["LMCache#4463","LMCache#4614","vllm#42911"]},{"id":"lmcache_whole","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"mla_kv_spec","library":"vllm","releases":">=0.25,<0.26","upstream":["vllm#47722","vllm#48378","vllm#48405","vllm#48896","vllm#48379"]},{"id":"turboquant_kv_spec","library":"vllm","releases":">=0.25,<0.27","upstream":["vllm#47604","vllm#47609"]},{"id":"profile_routing","library":"vllm","releases":">=0.25,<0.31","upstream":["vllm#57270"]},{"id":"dummy_token_routing","library":"vllm","releases":">=0.19","upstream":["vllm#57262"]},{"id":"kv_null_block","library":"vllm","releases":">=0.19,<0.29","upstream":["vllm#35541","vllm#41069","vllm#47272","vllm#48724"]},{"id":"kv_profile","library":"vllm","releases":">=0.32","upstream":[]},{"id":"lmcache_identity","library":"lmcache","releases":">=0.5.6","upstream":["LMCache#2961","vllm#44250"]},{"id":"lmcache_admission","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"lmcache_admission_in_process","library":"lmcache","releases":">=0.5.6","upstream":["LMCache#2517"]},{"id":"lmcache_exact_transfer","library":"lmcache","releases":">=0.5.6","upstream":[]},{"id":"profiling_neighbour","library":"vllm","releases":">=0.19","upstream":["vllm#56830","vllm#53591"]},{"id":"kv_override_check","library":"vllm","releases":">=0.19","upstream":["vllm#22234"]}]' \
      io.vllm-splint.reviewed='lmcache-0.5.6 vllm-0.19.0 vllm-0.19.1 vllm-0.20.0 vllm-0.20.1 vllm-0.20.2 vllm-0.21.0 vllm-0.22.0 vllm-0.22.1 vllm-0.23.0 vllm-0.24.0 vllm-0.25.0 vllm-0.25.1 vllm-0.26.0 vllm-0.27.0 vllm-0.27.1 vllm-0.28.0 vllm-0.29.0 vllm-0.30.0 vllm-0.31.0 vllm-0.32.0 vllm-0.33.0'
# end of labels
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 CMD ["splint", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["splint", "serve"]
