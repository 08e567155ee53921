"""From parameters and prompts to tokens. What is beside this package in jaxgen is what it or its users need."""
