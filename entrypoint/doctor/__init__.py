"""``splint doctor``: the preflight, and a reading of the configuration, before anything starts."""
