"""The engine: a thread that feeds prompts to a running loop and delivers the results.

`Engine` accepts prompts from any thread, and `generate_many` answers the prompts of an iterable. `runner` is the
thread. The loop itself is in `jaxgen.core.request.running`: its plan, its program, and what is sent with each chunk.
"""
