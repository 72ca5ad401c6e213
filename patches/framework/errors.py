"""What can go wrong, as types.

SplintError
├── PlanError               `splint plan` does not know it, or it can't be
├── RunDirectoryError       no private, writable run directory
├── MismatchError           a KV block is not what its profile says
├── ProbeError              a probe of the smoke tests could not do its work
├── GateOpenError           a control call of the smoke tests came after them
└── RefusedError            this process must not serve; exit code 78
    ├── SettingError        an SPLINT_* variable is unknown or malformed
    ├── FingerprintError    the source under a patch is not the one that was reviewed
    ├── TargetMissingError  the module has no such function or class any more
    ├── AlreadyReplacedError  somebody else stands where the patch should go
    ├── StaleAliasError     a name elsewhere still holds the unpatched object
    ├── BudgetError         the ranks can't have one KV budget
    ├── ProfileError        the engine's KV cache can't be described, or not alike in all its processes
    ├── BootstrapError      the start-up hooks did not run in this process
    └── EnvironmentRefusedError  a switch that takes work out of the patches' reach is on
"""

from __future__ import annotations

__all__ = [
    "AlreadyReplacedError",
    "BootstrapError",
    "BudgetError",
    "EnvironmentRefusedError",
    "FingerprintError",
    "GateOpenError",
    "MismatchError",
    "PlanError",
    "ProbeError",
    "ProfileError",
    "RefusedError",
    "RunDirectoryError",
    "SettingError",
    "SplintError",
    "StaleAliasError",
    "TargetMissingError",
]

EXIT_USAGE = 2
EXIT_SMOKE_FAILED = 70
EXIT_REFUSED = 78


class SplintError(Exception):
    """A problem that vllm-splint found: what was found, what was wanted, what to do."""

    def __init__(self, found: str, wanted: str, remedy: str) -> None:
        self.found = found
        self.wanted = wanted
        self.remedy = remedy
        super().__init__(found, wanted, remedy)

    def __str__(self) -> str:
        return f"{self.found}; wanted {self.wanted}. {self.remedy}"


class RunDirectoryError(SplintError):
    """No private, writable directory was found for the server's run files."""


class MismatchError(SplintError):
    """A KV block's dtype or shape is not the one that its profile says."""


class ProbeError(SplintError):
    """A probe of the KV cache could not do its work, or found a transfer that failed."""


class GateOpenError(SplintError):
    """A control call of the smoke tests, at a time when the gate is no longer closed for them."""


class PlanError(SplintError):
    """A deployment that can't be planned: something is not known to the byte, or it does not fit."""


class RefusedError(SplintError):
    """This process must not serve. Supervised servers end with exit code 78."""


class SettingError(RefusedError):
    """An ``SPLINT_*`` environment variable is unknown or its value is malformed."""


class FingerprintError(RefusedError):
    """The source under a patch differs from every source that a person has reviewed."""


class TargetMissingError(RefusedError):
    """The module does not define the function or class that a patch replaces."""


class AlreadyReplacedError(RefusedError):
    """The object under a patch was replaced by somebody else before the patch came."""


class StaleAliasError(RefusedError):
    """A module still holds a name for the unpatched object, and it can't be rebound."""


class BudgetError(RefusedError):
    """The ranks of a data-parallel group can't have one KV budget."""


class ProfileError(RefusedError):
    """The engine's KV cache can't be described, or its processes describe it differently."""


class BootstrapError(RefusedError):
    """The start-up hooks (the ``.pth`` file) did not run in this process."""


class EnvironmentRefusedError(RefusedError):
    """An environment switch takes part of the server out of the patches' reach."""
