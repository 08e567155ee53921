"""GGUF files: their metadata and their tables of tensors."""
