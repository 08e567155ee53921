"""Load and save Hugging Face checkpoints, tensor by tensor, without torch."""

from convert.adapter import load_adapter, save_adapter
from convert.errors import CheckpointError
from convert.hf import load_hf, save_hf
from convert.kv_heads import pool_kv_heads

__all__ = ["CheckpointError", "load_adapter", "load_hf", "pool_kv_heads", "save_adapter", "save_hf"]
