"""Which operations all ranks execute next, and in which order. Time and messages are arguments; nothing here waits."""
