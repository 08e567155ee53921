"""A loop that prompts enter and leave.

`plan_of` checks everything that needs no prompt. `device_loop` owns the state and the compiled program, and
`automaton_tables` contains the automata of prompts in flight. `schedule` decides what to send with each chunk and reads
the chunk's results; it runs only on the host.
"""
