"""Packed checkpoints as other programs publish them in safetensors files: FP8, compressed-tensors, GPTQ and AWQ."""
