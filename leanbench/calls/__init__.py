"""A call of `lean_attn_with_kvcache`: checks, settings, launch, and torch's operator."""
