"""qjax: a JAX inference engine for hybrid Qwen models."""
