"""The commands of `mingc`, one file a command: only these know export, runtime, verify and probe together."""
