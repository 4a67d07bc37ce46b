"""The shell: performs what the state decides, and lets others ask it."""
