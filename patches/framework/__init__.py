"""The machinery under the patches: records, import hooks, fingerprints, aliases, roster, settings, errors."""
