#!/bin/sh
# The main table: sh benchmarks/main_table.sh MODEL ENVIRONMENTS. For the 0.5B shape, this should take about an hour on
# two otherwise idle cores, half of it for the prompts of 4,096 tokens.
set -e
measure() {
    python -m benchmarks "$@" --model "$model" --environments "$environments" --rounds 3
}
model=$1 environments=$2
measure decode --programs jaxgen jaxgen:int8 jaxgen:fused transformers transformers:compile \
    llama.cpp llama.cpp:q8_0 llama.cpp:q4_0 keras-hub
measure batch --rows 1 8 --new-tokens 32 --programs jaxgen jaxgen:int8 transformers llama.cpp llama.cpp:q8_0
measure prefill --rows 1 --programs jaxgen jaxgen:int8 transformers llama.cpp
measure sampling --rows 1 8 --new-tokens 32 --programs jaxgen
measure capacity --new-tokens 32 --programs jaxgen
measure train --programs jaxgen transformers
measure startup --programs jaxgen transformers
measure context --programs jaxgen jaxgen:int8 transformers llama.cpp llama.cpp:q8_0
