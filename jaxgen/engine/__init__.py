"""The engine: a decode loop that accepts new prompts while the loop runs.

`Engine` accepts prompts from any thread, and `generate_many` answers the prompts of an iterable. `automaton_tables`
contains the automata of prompts in flight. `schedule` decides what to send with each chunk and reads the chunk's
results. `device_loop` owns the state and the compiled program.
"""
