"""llama.cpp under test, through llama-cpp-python: in bfloat16, q8_0 or q4_0, with a GGUF file made from the checkpoint.

The bfloat16 file is written tensor by tensor with the package gguf; llama.cpp itself quantizes it. Files are kept next
to the checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np
from worker import Program, cores, serve

FILE_TYPES = {"q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0}


@llama.llama_log_callback
def _say_nothing(*_) -> None:
    pass


class LlamaCpp(Program):
    def load(self, path: str, dtype: str, variant: str, mesh: list[int] | None) -> dict[str, Any]:
        file = gguf_file(Path(path), dtype)
        start = time.perf_counter()
        settings = llama.llama_model_default_params()
        settings.n_gpu_layers = 999  # all layers, if there is a GPU
        self.model = llama.llama_model_load_from_file(str(file).encode(), settings)
        seconds = time.perf_counter() - start
        total = llama.llama_model_size(self.model)
        names = {tensor.name: tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors}
        self.shape: tuple[int, ...] = ()
        self.context = self.prompts = self.steps = None
        build = Path(sys.prefix) / "build.json"
        device = "gpu" if llama.llama_supports_gpu_offload() else "cpu"
        return {
            "seconds": seconds,
            "step_bytes": total - (names["token_embd.weight"] if "output.weight" in names else 0),
            "platform": device,
            "device": device,
            "build": {"system": llama.llama_print_system_info().decode()}
            | (json.loads(build.read_text()) if build.exists() else {}),
        }

    def generate(self, ids: np.ndarray, new_tokens: int, room: int, options: dict[str, Any]) -> np.ndarray:
        rows, width = ids.shape
        samplers = [_sampler(options, room) for _ in range(rows)]
        if self.shape != (rows, width, room):
            self._open(rows, width, room)
        llama.llama_memory_clear(llama.llama_get_memory(self.context), False)
        tokens = np.empty((rows, new_tokens), np.int32)
        batch, last = self.prompts, np.arange(1, rows + 1) * width - 1
        _fill(batch, ids.reshape(-1), np.tile(np.arange(width), rows))
        for step in range(new_tokens):
            if llama.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
            for row, sampler in enumerate(samplers):
                tokens[row, step] = llama.llama_sampler_sample(sampler, self.context, int(last[row]))
            batch, last = self.steps, np.arange(rows)
            _fill(batch, tokens[:, step], np.full(rows, width + step))
        for sampler in samplers:
            llama.llama_sampler_free(sampler)
        return tokens

    def _open(self, rows: int, width: int, room: int) -> None:
        """Create a context with a cache of `room` tokens per row, and batches for the prompts and for a step."""
        if self.context is not None:
            llama.llama_batch_free(self.prompts)
            llama.llama_batch_free(self.steps)
            llama.llama_free(self.context)
        settings = llama.llama_context_default_params()
        settings.n_seq_max, settings.n_ctx, settings.n_batch = rows, rows * -(-room // 256) * 256, rows * width
        settings.n_threads = settings.n_threads_batch = cores()
        self.context = llama.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot create a context of {rows} x {room} tokens")
        self.prompts, self.steps = _batch(rows, width), _batch(rows, 1)
        self.shape = (rows, width, room)


def _batch(rows: int, width: int) -> llama.llama_batch:
    """Return a batch with `width` tokens per row; only each row's last token gets logits."""
    batch = llama.llama_batch_init(rows * width, 0, 1)
    batch.n_tokens = rows * width
    for index in range(rows * width):
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, index // width
        batch.logits[index] = index % width == width - 1
    return batch


def _fill(batch: llama.llama_batch, tokens: np.ndarray, positions: np.ndarray) -> None:
    np.ctypeslib.as_array(batch.token, (batch.n_tokens,))[:] = tokens
    np.ctypeslib.as_array(batch.pos, (batch.n_tokens,))[:] = positions


def _sampler(options: dict[str, Any], room: int):
    """Return a sampler for transformers' options. Applying top-k before the temperature makes no difference."""
    known = {"do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "capacity"}
    if unknown := set(options) - known:
        raise NotImplementedError(f"no {', '.join(sorted(unknown))}")
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    links = []
    if "repetition_penalty" in options:
        links.append(llama.llama_sampler_init_penalties(room, options["repetition_penalty"], 0.0, 0.0))
    if options.get("do_sample"):
        links += [llama.llama_sampler_init_top_k(options["top_k"])] if options.get("top_k") else []
        links += [llama.llama_sampler_init_temp(options["temperature"])] if "temperature" in options else []
        links += [llama.llama_sampler_init_top_p(options["top_p"], 1)] if "top_p" in options else []
    links.append(llama.llama_sampler_init_dist(0) if options.get("do_sample") else llama.llama_sampler_init_greedy())
    for link in links:
        llama.llama_sampler_chain_add(chain, link)
    return chain


def gguf_file(checkpoint: Path, dtype: str) -> Path:
    """Return a checkpoint's GGUF file. If there is none, write it in a separate process, whose memory is then freed."""
    file = checkpoint.with_name(f"{checkpoint.name}-gguf") / f"{dtype}.gguf"
    if dtype != "bfloat16":
        gguf_file(checkpoint, "bfloat16")
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        unfinished = file.with_suffix(".part")
        subprocess.run([sys.executable, __file__, str(checkpoint), dtype, str(unfinished)], check=True)
        unfinished.rename(file)
    return file


def _convert(checkpoint: Path, dtype: str, file: Path) -> None:
    if dtype == "bfloat16":
        _write(checkpoint, file)
        return
    settings = llama.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = FILE_TYPES[dtype], cores()
    source = str(gguf_file(checkpoint, "bfloat16"))
    if llama.llama_model_quantize(source.encode(), str(file).encode(), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp cannot quantize {source} to {dtype}")


def _write(checkpoint: Path, file: Path) -> None:
    """Write a Qwen2 checkpoint of bfloat16 weights as GGUF, without its tokenizer."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "qwen2":
        raise ValueError(f"GGUF files are written for qwen2, not for {config['model_type']}")
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, bits in _tensors(checkpoint):
        name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if bits.ndim == 1:  # llama.cpp applies biases and norms in float32
            writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor's name and its bits as uint16, from a checkpoint's safetensors files."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"GGUF files are written from bfloat16, and {name} is {entry['dtype']}")
            start, _ = entry["data_offsets"]
            yield name, np.memmap(file, np.uint16, "r", 8 + size + start, tuple(entry["shape"]))


if __name__ == "__main__":
    llama.llama_log_set(_say_nothing, ctypes.c_void_p(0))
    if len(sys.argv) > 1:
        _convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    else:
        serve(LlamaCpp(), {"llama-cpp-python": llama.__version__, "gguf": metadata.version("gguf")})
