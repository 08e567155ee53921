"""Check that transformers reads a 4-bit checkpoint that jaxgen wrote as the matrices that jaxgen reads.

Run with a Python that has requirements-packed.txt: `python check_int4.py SAVED NONE`. `SAVED` was written with
`quantize="int4"`, and `NONE` with `quantize="none"` from `SAVED`.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def main() -> None:
    saved, none = sys.argv[1:]
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 40, (2, 9)))
    expected = AutoModelForCausalLM.from_pretrained(none, attn_implementation="eager")
    for options in ({}, {"quantization_config": CompressedTensorsConfig(dequantize=True)}):
        read = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager", **options)
        with torch.no_grad():
            logits, wanted = (model(ids).logits for model in (read, expected))
        if options:
            own, other = read.state_dict(), expected.state_dict()
            assert own.keys() == other.keys()
            assert all(own[name].dtype == other[name].dtype and torch.equal(own[name], other[name]) for name in own)
        largest = (logits - wanted).abs().max().item()
        scale = wanted.abs().max().item()
        print(f"{'dequantize=True' if options else 'as stored'}: logits differ by at most {largest}, of {scale}")
        # Without dequantize=True, transformers does not round the matrices of a float32 model to bfloat16, the dtype of
        # the scales.
        assert largest <= (0 if options or read.dtype == torch.bfloat16 else 0.02 * scale)


if __name__ == "__main__":
    main()
