"""What a process needs besides mathematics: its allocator and its files."""
