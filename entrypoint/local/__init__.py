"""The whole stack on one machine: a tiny model, the LMCache server and the patched vLLM."""
