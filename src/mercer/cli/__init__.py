"""The command line: one file a command, each with a `register(app)` and its heavy imports inside the command."""
