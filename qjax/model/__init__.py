"""The model: its config, weights, checkpoint formats, tokenizer, chat template and forward pass."""
