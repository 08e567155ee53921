"""The engine, which answers prompts in the slots of a running loop as they arrive.

`Engine` accepts prompts from threads, and `generate_many` from an iterable. `forms` reads prompts and their options,
`tables` shares the states of grammars between prompts, `schedule` decides what to send with each chunk and reads its
results, and `device` owns the state and the compiled program.
"""
