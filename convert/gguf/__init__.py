"""GGUF files as checkpoints: the config in their metadata, and their tensors as a model's weights."""
