"""Checkpoints in and out: Hugging Face directories to parameters and back, tensor by tensor, no torch."""

from convert.hf import load_hf, save_hf
from convert.kv_heads import pool_kv_heads
from convert.safetensors import CheckpointError

__all__ = ["CheckpointError", "load_hf", "pool_kv_heads", "save_hf"]
