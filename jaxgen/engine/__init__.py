"""The engine: prompts that arrive one by one, answered in slots of a running loop.

`Engine` drives it from threads, `generate_many` from an iteration. `forms` reads prompts and their options, `tables`
shares the grammars' states, `schedule` decides which changes each chunk begins with and reads its results, and `device`
owns the state and the compiled program.
"""
