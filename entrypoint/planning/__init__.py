"""``splint plan``: weights, KV cache and blocks of a deployment, from a model's configuration alone."""
