"""All checks, in the order in which they are shown: devices, then this system, then what is installed and asked for."""

from entrypoint.preflight.check import Check
from entrypoint.preflight.checks import (
    allreduce,
    caches,
    descriptors,
    driver,
    ecc,
    foreign,
    hash_seed,
    kv_dtype,
    lmcache_ops,
    matmul,
    memlock,
    memory,
    model,
    port,
    releases,
    shm,
    torch_abi,
)

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    driver.CHECK,
    ecc.CHECK,
    memory.CHECK,
    foreign.CHECK,
    matmul.CHECK,
    allreduce.CHECK,
    shm.CHECK,
    memlock.CHECK,
    descriptors.CHECK,
    caches.CHECK,
    port.CHECK,
    model.CHECK,
    releases.CHECK,
    torch_abi.CHECK,
    lmcache_ops.CHECK,
    hash_seed.CHECK,
    kv_dtype.CHECK,
)
