"""Other forms of the model's operations, for the sake of XLA's compilers.

The rest of the model calls them by name. A function whose first argument is `plain` computes what `plain` does with the
other arguments; on the platform that it is for, in another form.

| module | for | measured with jax |
|---|---|---|
| `cpu`, `lanes` | a CPU's compiler | 0.10.2 and 0.12.0.1, by `benchmarks/workarounds.py` |
| `gpu` | an NVIDIA GPU's compiler, for an H100 | 0.10.2 to 0.11.2, by `tests/test_compilers.py` |
| `products` | chooses the form of a product for each of them | |

`tests/model/test_workarounds.py` and `tests/model/test_lanes.py` compile for a CPU without each form, and
`tests/test_compilers.py` for a GPU. A test fails if the compiler has learnt what the form is for, and then it can go.
What only a clock shows, that lanes and `cpu.weight_first` are faster, `python -m benchmarks workarounds` measures.
"""
