"""The OpenAI-compatible server: what clients send is text, what decides are the engine's own tokens."""
