#!/bin/sh
# The main table: sh benchmarks/main_table.sh MODEL ENVIRONMENTS. An estimated 25 to 35 minutes for the 0.5B shape on two quiet cores.
set -e
measure() {
    python -m benchmarks "$@" --model "$model" --environments "$environments" --rounds 3
}
model=$1 environments=$2
measure decode --programs jaxgen transformers transformers:static transformers:compile \
    llama.cpp llama.cpp:q8_0 llama.cpp:q4_0 keras-hub
measure decode --name float32 --programs jaxgen:float32 transformers:float32 transformers:compile:float32
measure prefill --rows 1 --programs jaxgen transformers llama.cpp keras-hub
measure batch --rows 1 8 --new-tokens 32 --programs jaxgen transformers llama.cpp llama.cpp:q8_0
measure sampling --new-tokens 32 --programs jaxgen transformers llama.cpp
measure context --prompt 128 1024 2048 --programs jaxgen transformers llama.cpp
