"""A store in this process's memory: no files, no threads, no daemon. For tests of adapters and of users' own code."""
