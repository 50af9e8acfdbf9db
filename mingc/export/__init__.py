"""Ahead-of-time export: checkpoint → artifact.

A `recipe` holds the user's choices, a `plan` everything that will be built, and `run` builds it: its `schedule` gives
the `tasks` (one engine, one check, a rank's weights) to worker processes. `stages` define the model out of `layers`,
and say with `weights` where in a `checkpoint` each weight comes from; `compile` holds the backends.
"""
