"""The command line of vllm-splint, what runs before vLLM starts, and the smoke tests."""
