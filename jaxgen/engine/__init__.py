"""The engine: prompts that come one by one, answered in slots of a running loop.

`Engine` drives it from threads, `generate_many` from an iteration. `forms` reads prompts and their options, `tables`
shares the grammars' states, `schedule` decides what each chunk begins with and reads what happened in it, and `device`
has the state and the compiled program.
"""
