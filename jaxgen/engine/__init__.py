"""The engine, which answers prompts as they arrive, in the slots of a running loop.

`Engine` accepts prompts from any thread, and `generate_many` from an iterable. `forms` reads prompts and their options,
and `tables` contains the automata of prompts in flight. `schedule` decides what to send with each chunk and reads the
chunk's results. `device` owns the state and the compiled program.
"""
