"""Everything that can be found out before a model is loaded: one small module a check."""
