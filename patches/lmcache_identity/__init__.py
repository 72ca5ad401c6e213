"""Cache keys that say whose bytes they stand for."""
